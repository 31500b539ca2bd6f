//! `/v1/chat/completions`, where the model's folder has a chat template.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::completions::{head, reason, streamed, usage};
use super::memories::How;
use super::{encode, json_of, refuse_undone};
use crate::app::App;
use crate::asking::Question;
use crate::keys::Client;
use crate::refusal::{Refusal, Reply};

#[derive(Deserialize)]
pub struct Chat {
    messages: Vec<Message>,
    max_completion_tokens: Option<usize>,
    memory: Option<String>,
    n: Option<usize>,
    #[serde(flatten)]
    how: How,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: Content,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a text, or a list of parts with a `text`")]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Part {
    text: String,
}

impl Content {
    fn text(self) -> String {
        match self {
            Content::Text(text) => text,
            Content::Parts(parts) => parts.iter().map(|part| part.text.as_str()).collect(),
        }
    }
}

pub async fn complete(State(app): State<Arc<App>>, Extension(client): Extension<Client>, body: Body) -> Reply<Response> {
    let template = app.chat.as_ref().ok_or_else(|| Refusal::missing("path: the model's folder has no chat template"))?;
    let (Chat { messages, max_completion_tokens, memory, n, mut how, others }, room) = json_of(&app, body).await?;
    refuse_undone(&others)?;
    if others.get("logprobs").is_some_and(|wanted| wanted == true) {
        return Err(Refusal::field("logprobs", "expected false: /v1/completions tells them"));
    }
    if n.is_some_and(|n| n != 1) {
        return Err(Refusal::field("n", "expected 1"));
    }
    if messages.is_empty() {
        return Err(Refusal::field("messages", "expected at least one message, got none"));
    }
    how.max_tokens = how.max_tokens.or(max_completion_tokens);
    let messages: Vec<(String, String)> = messages.into_iter().map(|m| (m.role, m.content.text())).collect();
    let text = template.render(&messages).map_err(|e| Refusal::field("messages", e.to_string()))?;
    let memory = memory.map(|id| app.memories.get(&id, client)).transpose()?;
    let session = memory.as_ref().map_or_else(|| Arc::new(app.empty.fork()), |memory| memory.now().session);
    let prompt = encode(&app, text).await?;
    let (options, stop, read) = (how.options(&app, 512, 1.0)?, how.stop(), prompt.len());
    let question = Question { session, prompt, options, stop, listener: None, _room: room };
    if how.stream.unwrap_or(false) {
        let begins = AtomicBool::new(true);
        let choice = move |text: String, reason: Option<&str>| {
            let mut delta = Map::new();
            // Clients put the pieces of every field together: who speaks is said once.
            if begins.swap(false, Ordering::Relaxed) {
                delta.insert("role".into(), "assistant".into());
            }
            if !text.is_empty() {
                delta.insert("content".into(), text.into());
            }
            json!([{ "index": 0, "delta": delta, "finish_reason": reason }])
        };
        let head = head(&app, "chatcmpl", "chat.completion.chunk");
        return Ok(streamed(app, memory, question, head, choice, how.wants_usage()));
    }
    let answer = app.questions.ask(question).await?;
    let message = json!({ "role": "assistant", "content": answer.text });
    let mut reply = head(&app, "chatcmpl", "chat.completion");
    let said = answer.tokens.len();
    reply.insert("choices".into(), json!([{ "index": 0, "message": message, "finish_reason": reason(&answer) }]));
    reply.insert("usage".into(), usage([read, said]));
    Ok(Json(reply).into_response())
}
