//! `/v1/memories` and what is below it.

use std::sync::Arc;
use std::time::Duration;

use armt::answer::Answer;
use armt::generate::{Options, Sampling};
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{Id, LARGE, Whole, aside, encode, events, json_of, received, tokens_read, whole};
use crate::app::App;
use crate::asking::Question;
use crate::keys::Client;
use crate::memory::{Made, Memory, Now};
use crate::metrics::Metrics;
use crate::refusal::{Refusal, Reply};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Make {
    name: Option<String>,
    /// Seconds that it stays when nobody uses it.
    ttl: Option<u64>,
    /// The memory to go on from.
    from: Option<String>,
}

pub async fn make(State(app): State<Arc<App>>, Extension(client): Extension<Client>, body: Body) -> Reply<Response> {
    let (Make { name, ttl, from }, _room) = json_of(&app, body).await?;
    if name.as_ref().is_some_and(|name| name.chars().count() > 200) {
        return Err(Refusal::field("name", "expected at most 200 characters"));
    }
    if let Some(keeper) = &app.keeper {
        keeper.expect_room()?;
    }
    let stays = ttl.map(Duration::from_secs).or(app.limits.idle);
    let made = Made::now(client, name, stays)?;
    let memory = match from {
        Some(id) => Memory::fork(made, &app.memories.get(&id, client)?.now()),
        None => Memory::new(made, Arc::new(app.empty.fork()), 0, Vec::new()),
    };
    let memory = app.memories.add(memory, app.limits.memories)?;
    if let Err(why) = kept(&app, &memory).await {
        // Its client does not hear what it is called.
        app.remove(&memory.id, client).unwrap_or_default();
        return Err(why);
    }
    Ok((StatusCode::CREATED, described(&app, memory.clone()).await?).into_response())
}

/// What clients are told of a memory. It takes a look at all of its numbers.
async fn described(app: &Arc<App>, memory: Arc<Memory>) -> Reply<Json<Value>> {
    let app = app.clone();
    aside(LARGE, move || Ok(Json(memory.described(&app.name)?))).await
}

pub async fn list(State(app): State<Arc<App>>, Extension(client): Extension<Client>) -> Reply<Json<Value>> {
    let memories = app.memories.of(client);
    let data = aside(LARGE, move || memories.iter().map(|memory| memory.described(&app.name)).collect::<Reply<Vec<_>>>());
    Ok(Json(json!({ "object": "list", "data": data.await? })))
}

pub async fn describe(State(app): State<Arc<App>>, Extension(client): Extension<Client>, Id(id): Id) -> Reply<Json<Value>> {
    let memory = app.memories.get(&id, client)?;
    described(&app, memory.clone()).await
}

pub async fn delete(State(app): State<Arc<App>>, Extension(client): Extension<Client>, Id(id): Id) -> Reply<Response> {
    app.remove(&id, client)?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Waits until a memory is kept as it is, where memories are.
pub async fn kept(app: &App, memory: &Arc<Memory>) -> Reply<()> {
    let Some(keeper) = &app.keeper else { return Ok(()) };
    let version = memory.now().version;
    let mut kept = memory.kept.subscribe();
    if !keeper.has(memory) {
        keeper.keep(memory);
    }
    let written = kept.wait_for(|kept| kept.version >= version || kept.failed.is_some());
    let written = tokio::time::timeout(app.limits.answering, written).await;
    match written {
        _ if memory.is_deleted() => Err(Refusal::missing("memory")),
        Ok(Ok(kept)) if kept.failed.is_none() => Ok(()),
        // Why is the server's matter, and stands in its log.
        _ => Err(Refusal::unavailable("the memory could not be written to its folder; it is tried again")),
    }
}

/// Ends the document: what comes after it begins a segment of its own.
pub async fn end(State(app): State<Arc<App>>, Extension(client): Extension<Client>, Id(id): Id) -> Reply<Json<Value>> {
    let memory = app.memories.get(&id, client)?;
    let reserved = memory.reserve()?;
    let metrics = app.metrics.clone();
    app.questions
        .work(move |_| {
            // As long as it is worked on, also where its client has gone away.
            let own = &reserved.0;
            let Now { session, text_bytes, .. } = own.now();
            let before = session.certain_tokens();
            let mut session = session.fork();
            session.end_document()?;
            Metrics::add(&metrics.tokens, session.certain_tokens() - before);
            own.put(session, text_bytes, None);
            Ok(())
        })
        .await?;
    kept(&app, &memory).await?;
    described(&app, memory.clone()).await
}

/// How to answer, as all endpoints that generate have it.
#[derive(Deserialize, Default)]
pub struct How {
    pub max_tokens: Option<usize>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<usize>,
    pub seed: Option<Seed>,
    pub stop: Option<Stop>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
}

#[derive(Deserialize, Default)]
pub struct StreamOptions {
    include_usage: Option<bool>,
}

/// Any whole number of 64 bits: which answer it stands for is the server's matter.
#[derive(Deserialize)]
#[serde(untagged, expecting = "seed: expected a whole number")]
pub enum Seed {
    Whole(u64),
    Below(i64),
}

impl Seed {
    fn number(&self) -> u64 {
        match self {
            Seed::Whole(seed) => *seed,
            Seed::Below(seed) => seed.cast_unsigned(),
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "stop: expected a text or a list of texts")]
pub enum Stop {
    One(String),
    Some(Vec<String>),
}

impl How {
    /// What the library takes. `temperature` is what an endpoint has where none is given.
    pub fn options(&self, app: &App, tokens: usize, temperature: f32) -> Reply<Options> {
        let max_new_tokens = self.max_tokens.unwrap_or(tokens.min(app.limits.answer));
        if max_new_tokens > app.limits.answer {
            return Err(Refusal::field("max_tokens", format!("expected at most {}, got {max_new_tokens}", app.limits.answer)));
        }
        let temperature = self.temperature.unwrap_or(temperature);
        if !(0.0..=100.0).contains(&temperature) {
            return Err(Refusal::field("temperature", format!("expected 0 to 100, got {temperature}")));
        }
        if let Some(p) = self.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
            return Err(Refusal::field("top_p", format!("expected above 0 and at most 1, got {p}")));
        }
        if self.top_k == Some(0) {
            return Err(Refusal::field("top_k", "expected at least 1, got 0"));
        }
        let sampling = match temperature {
            0.0 => Sampling::Greedy,
            _ => Sampling::Random {
                temperature,
                top_k: self.top_k,
                top_p: self.top_p,
                seed: self.seed.as_ref().map_or_else(fresh_seed, Seed::number),
            },
        };
        Ok(Options { max_new_tokens, sampling, ..Options::default() })
    }

    /// Whether a stream is to end with how many tokens there were.
    pub fn wants_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false)
    }

    pub fn stop(&self) -> Vec<String> {
        match &self.stop {
            None => Vec::new(),
            Some(Stop::One(text)) => vec![text.clone()],
            Some(Stop::Some(texts)) => texts.clone(),
        }
    }
}

fn fresh_seed() -> u64 {
    let mut bytes = [0; 8];
    // Without random numbers an answer is one that could have come.
    getrandom::fill(&mut bytes).unwrap_or_default();
    u64::from_le_bytes(bytes)
}

/// The fields of a question.
const ASK: [&str; 9] = ["question", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "logprobs", "stream"];

#[derive(Deserialize)]
pub struct Ask {
    question: String,
    /// Have the tokens of the answer, with their probabilities.
    logprobs: Option<bool>,
    #[serde(flatten)]
    how: How,
}

pub async fn ask(State(app): State<Arc<App>>, Extension(client): Extension<Client>, Id(id): Id, body: Body) -> Reply<Response> {
    let memory = app.memories.get(&id, client)?;
    let (asked, room): (serde_json::Map<String, Value>, _) = json_of(&app, body).await?;
    // Not every field that is not ours is a mistake to the endpoints that have OpenAI's; here it is.
    if let Some(unknown) = asked.keys().find(|field| !ASK.contains(&field.as_str())) {
        return Err(Refusal::invalid(format!("expected none but {}, got {unknown}", ASK.join(", "))));
    }
    let Ask { question, logprobs, how } =
        serde_json::from_value(asked.into()).map_err(|e| Refusal::invalid(format!("the body: {e}")))?;
    if question.is_empty() {
        return Err(Refusal::field("question", "expected a question, got nothing"));
    }
    let now = memory.now();
    let session = now.session.clone();
    let tokens_read = tokens_read(now).await?;
    let after = session.model().config().after_question.clone().unwrap_or_default();
    let prompt = encode(&app, format!("{question}{after}")).await?;
    let (options, stop) = (how.options(&app, 64, 0.0)?, how.stop());
    let seen = session.clone();
    let told = move |answer: Answer| -> Reply<Value> {
        let mut told = json!({
            "answer": answer.text,
            "probability": answer.probability(),
            "tokens_read": tokens_read,
            "segments_read": seen.state().segments_read(),
        });
        if logprobs == Some(true) {
            let token = |t: &armt::answer::AnswerToken| json!({ "token": t.token, "text": t.text, "probability": t.probability });
            told["tokens"] = answer.tokens.iter().map(token).collect();
        }
        Ok(told)
    };
    if !how.stream.unwrap_or(false) {
        let answer = app.questions.ask(Question { session, prompt, options, stop, listener: None, _room: room }).await?;
        return Ok(Json(told(answer)?).into_response());
    }
    let (say, said) = mpsc::unbounded_channel();
    let question = Question { session, prompt, options, stop, listener: None, _room: room };
    tokio::spawn(async move {
        let _memory = memory;
        let Some(answer) = app.questions.tell(question, &say, |text| json!({ "text": text })).await else { return };
        let last = answer.and_then(told).unwrap_or_else(|refusal| refusal.body());
        let _ = say.send(last);
        let _ = say.send(Value::Null);
    });
    Ok(events(received(said)))
}

pub async fn download(State(app): State<Arc<App>>, Extension(client): Extension<Client>, Id(id): Id) -> Reply<Response> {
    let memory = app.memories.get(&id, client)?;
    let Now { session, .. } = memory.now();
    let (bytes, tag) = aside(LARGE, move || {
        let bytes = session.to_bytes()?;
        let tag = format!("\"{}\"", blake3::hash(&bytes));
        Ok((bytes, tag))
    })
    .await?;
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_string()),
        (header::CONTENT_DISPOSITION, format!("attachment; filename=\"{id}.mem\"")),
        (header::ETAG, tag),
    ];
    Ok((headers, bytes).into_response())
}

/// A file in place of what was read: looked at whole before it takes the place.
pub async fn upload(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Id(id): Id,
    headers: HeaderMap,
    body: Body,
) -> Reply<Json<Value>> {
    let memory = app.memories.get(&id, client)?;
    let most = app.largest_file;
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if length.ok_or_else(Refusal::length_required)? > most {
        return Err(Refusal::too_large(most));
    }
    if let Some(keeper) = &app.keeper {
        keeper.expect_room()?;
    }
    let reserved = memory.reserve()?;
    let Whole { bytes, room } = whole(&app, body, most).await?;
    app.questions
        .work(move |_| {
            // As long as it is worked on, also where its client has gone away.
            let (own, _room) = (&reserved.0, room);
            let mut session = own.now().session.fork();
            session.from_bytes(&bytes)?;
            own.replace(session);
            Ok(())
        })
        .await?;
    kept(&app, &memory).await?;
    described(&app, memory.clone()).await
}
