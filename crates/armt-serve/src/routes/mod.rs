//! HTTP: which path does what, who may, and how bodies come and go.

mod chat;
mod completions;
mod memories;
mod text;
mod tokens;

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{FromRequestParts, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::{Stream, StreamExt};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use crate::app::{App, PERMIT};
use crate::asking::Room;
use crate::keys::Client;
use crate::memory::Now;
use crate::metrics::Metrics;
use crate::refusal::{Refusal, Reply};

/// Every path with its methods, as `/openapi.json` has them.
pub const ROUTES: [(&str, &[&str]); 17] = [
    ("/", &["get"]),
    ("/health", &["get"]),
    ("/metrics", &["get"]),
    ("/openapi.json", &["get"]),
    ("/v1/models", &["get"]),
    ("/v1/models/{id}", &["get"]),
    ("/v1/memories", &["get", "post"]),
    ("/v1/memories/{id}", &["get", "delete"]),
    ("/v1/memories/{id}/text", &["post"]),
    ("/v1/memories/{id}/ask", &["post"]),
    ("/v1/memories/{id}/end", &["post"]),
    ("/v1/memories/{id}/file", &["get", "put"]),
    ("/v1/completions", &["post"]),
    ("/v1/chat/completions", &["post"]),
    ("/tokenize", &["post"]),
    ("/detokenize", &["post"]),
    ("/tokenizer_info", &["get"]),
];

/// Paths that need no key: they tell nothing of anybody.
const OPEN: [&str; 3] = ["/", "/health", "/openapi.json"];

pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/health", get(|| async { Json(json!({ "status": "ok" })) }))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(|| async { ([(header::CONTENT_TYPE, "application/json")], include_str!("../openapi.json")) }))
        .route("/v1/models", get(models))
        .route("/v1/models/{id}", get(model))
        .route("/v1/memories", get(memories::list).post(memories::make))
        .route("/v1/memories/{id}", get(memories::describe).delete(memories::delete))
        .route("/v1/memories/{id}/text", post(text::text))
        .route("/v1/memories/{id}/ask", post(memories::ask))
        .route("/v1/memories/{id}/end", post(memories::end))
        .route("/v1/memories/{id}/file", get(memories::download).put(memories::upload))
        .route("/v1/completions", post(completions::complete))
        .route("/v1/chat/completions", post(chat::complete))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/tokenizer_info", get(tokens::info))
        .fallback(|| async { Refusal::missing("path") })
        .method_not_allowed_fallback(|| async { Refusal::method() })
        .layer(from_fn_with_state(app.clone(), guard))
        .with_state(app)
}

/// Who asks, and from where; counts what came of it. Nothing of a request is logged.
async fn guard(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let response = match admit(&app, request.headers(), request.uri().path()) {
        Ok(client) => {
            request.extensions_mut().insert(client);
            next.run(request).await
        }
        Err(refusal) => refusal.into_response(),
    };
    let class = usize::from(response.status().as_u16() / 100);
    app.metrics.statuses.get(class).into_iter().for_each(|counter| Metrics::add(counter, 1));
    response
}

fn admit(app: &App, headers: &HeaderMap, path: &str) -> Reply<Client> {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let host = text(header::HOST).ok_or_else(|| Refusal::invalid("expected a Host header"))?;
    if !app.knows_host(host) {
        return Err(Refusal::foreign("this server is not known by that name (`--allow-host` adds one)"));
    }
    // A page of another place must not use this server in its reader's name.
    if let Some(origin) = headers.get(header::ORIGIN) {
        let own = origin.to_str().ok().and_then(|origin| origin.split_once("://")).is_some_and(|(_, origin)| origin == host);
        if !own {
            return Err(Refusal::foreign("pages of other places may not use this server"));
        }
    }
    match &app.keys {
        None => Ok(Client::ALL),
        Some(_) if OPEN.contains(&path) => Ok(Client::ALL),
        Some(keys) => keys.client(text(header::AUTHORIZATION)).ok_or_else(Refusal::unknown_key),
    }
}

/// The page. Only what it brings itself runs in it.
async fn page() -> Reply<Response> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|_| Refusal::failure("the system gives no random numbers"))?;
    let nonce = format!("{:032x}", u128::from_le_bytes(random));
    let policy = format!(
        "default-src 'none'; connect-src 'self'; img-src 'self' data:; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let page = include_str!("../page.html").replace("NONCE", &nonce);
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8".to_string()),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".into()),
        (header::REFERRER_POLICY, "no-referrer".into()),
        (header::CACHE_CONTROL, "no-store".into()),
    ];
    Ok((headers, page).into_response())
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let text = app.metrics.text(&[
        ("armt_memories", "Memories that there are.", app.memories.count() as f64),
        ("armt_texts_on_their_way", "Texts that are being read.", app.readings.count() as f64),
        ("armt_questions_waiting", "Questions that wait.", app.questions.count() as f64),
    ]);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [described(&app)] }))
}

async fn model(State(app): State<Arc<App>>, Id(id): Id) -> Reply<Json<Value>> {
    if id == app.name { Ok(Json(described(&app))) } else { Err(Refusal::missing("model")) }
}

fn described(app: &App) -> Value {
    let model = app.empty.model();
    json!({
        "id": app.name,
        "object": "model",
        "created": 0,
        "owned_by": "armt",
        "fingerprint": app.empty.owner().model,
        "parameters": model.parameters(),
        "segment_size": model.config().segment_size,
        "chat": app.chat.is_some(),
    })
}

/// The part of a path that names something. What no name can be is not there.
struct Id(String);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Reply<Self> {
        let Path(id) = Path::from_request_parts(parts, state).await.map_err(|_| Refusal::missing("path"))?;
        Ok(Id(id))
    }
}

/// What takes longer than this many bytes of text is done beside the threads that all requests share.
const LARGE: usize = 16 << 10;

/// Does something with so many bytes, at once where they are few.
async fn aside<T: Send + 'static>(bytes: usize, work: impl FnOnce() -> Reply<T> + Send + 'static) -> Reply<T> {
    if bytes < LARGE {
        return work();
    }
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| Err(Refusal::failure("the work was lost")))
}

/// The tokens of a text.
async fn encode(app: &Arc<App>, text: String) -> Reply<Vec<i32>> {
    let app = app.clone();
    aside(text.len(), move || Ok(app.empty.tokenizer().encode(&text)?)).await
}

/// Tokens that a memory has read. Where much of its text is open they take a while to count.
async fn tokens_read(now: Now) -> Reply<u64> {
    let open = now.session.state().tails()[0].text.bytes.len();
    aside(open, move || now.tokens_read()).await
}

/// A body of JSON, whole, with the room that it takes. An empty one is `{}`.
async fn json_of<T: DeserializeOwned + Send + 'static>(app: &App, body: Body) -> Reply<(T, Room)> {
    let Whole { bytes, room } = whole(app, body, app.limits.body).await?;
    aside(bytes.len(), move || {
        let bytes: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
        // A list would be taken for the fields in their order.
        if bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[') {
            return Err(Refusal::invalid("the body: expected an object, got a list"));
        }
        let read = serde_json::from_slice(bytes).map_err(|e| Refusal::invalid(format!("the body: {e}")))?;
        Ok((read, room))
    })
    .await
}

/// What OpenAI's endpoints have and this server does not do. A value that asks for nothing is passed over.
fn refuse_undone(fields: &Map<String, Value>) -> Reply<()> {
    const UNDONE: [&str; 7] =
        ["frequency_penalty", "presence_penalty", "logit_bias", "tools", "functions", "response_format", "top_logprobs"];
    for name in UNDONE {
        let asks = match fields.get(name) {
            None | Some(Value::Null) => false,
            Some(Value::Number(n)) => n.as_f64() != Some(0.0),
            Some(Value::Array(list)) => !list.is_empty(),
            Some(Value::Object(map)) => !map.is_empty() && map.get("type") != Some(&"text".into()),
            Some(_) => true,
        };
        if asks {
            return Err(Refusal::field(name, "this server does not do that: expected none"));
        }
    }
    Ok(())
}

/// A whole body, and the room that it takes from others until all that became of it is gone too.
struct Whole {
    bytes: Vec<u8>,
    room: Room,
}

/// A whole body of at most so many bytes.
async fn whole(app: &App, body: Body, most: u64) -> Reply<Whole> {
    // One that says so need not be sent.
    if body.size_hint().lower() > most {
        return Err(Refusal::too_large(most));
    }
    let come = async {
        let mut pieces = Pieces::new(app, body);
        let (mut bytes, mut held): (Vec<u8>, Option<OwnedSemaphorePermit>) = (Vec::new(), None);
        while let Some(piece) = pieces.next().await? {
            let length = (bytes.len() + piece.len()) as u64;
            if length > most {
                return Err(Refusal::too_large(most));
            }
            // For all that has come together: pieces may be of one byte.
            let more = length.div_ceil(PERMIT) as u32 - held.as_ref().map_or(0, |held| held.num_permits() as u32);
            let room = app.bodies.clone().try_acquire_many_owned(more);
            let room = room.map_err(|_| Refusal::unavailable("too many large bodies are on their way"))?;
            match &mut held {
                Some(held) => held.merge(room),
                none => *none = Some(room),
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(Whole { bytes, room: held.map(Arc::new) })
    };
    tokio::time::timeout(app.limits.answering, come).await.unwrap_or_else(|_| Err(Refusal::silence()))
}

/// A body piece by piece. One that stays silent for too long is refused.
struct Pieces {
    stream: axum::body::BodyDataStream,
    silence: std::time::Duration,
}

impl Pieces {
    fn new(app: &App, body: Body) -> Self {
        Pieces { stream: body.into_data_stream(), silence: app.limits.silence }
    }

    async fn next(&mut self) -> Reply<Option<Bytes>> {
        let piece = tokio::time::timeout(self.silence, self.stream.next()).await.map_err(|_| Refusal::silence())?;
        piece.transpose().map_err(|e| Refusal::invalid(format!("the body ended early: {e}")))
    }
}

/// A reply of events (SSE), each of them JSON.
fn events(stream: impl Stream<Item = Value> + Send + 'static) -> Response {
    let lines = stream.map(|event| {
        Ok::<_, Infallible>(match event {
            // OpenAI's sign of the end.
            Value::Null => "data: [DONE]\n\n".to_string(),
            event => format!("data: {event}\n\n"),
        })
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    (StatusCode::OK, headers, Body::from_stream(lines)).into_response()
}

/// What comes through a channel, as a stream.
fn received<T: Send + 'static>(receiver: mpsc::UnboundedReceiver<T>) -> impl Stream<Item = T> + Send + 'static {
    futures_util::stream::unfold(receiver, |mut receiver| async move { receiver.recv().await.map(|item| (item, receiver)) })
}

/// Whether a client wants events.
fn wants_events(headers: &HeaderMap) -> bool {
    headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).is_some_and(|accept| accept.contains("text/event-stream"))
}
