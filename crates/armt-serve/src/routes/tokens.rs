//! `/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM has them and lm-evaluation-harness asks for them.

use std::sync::Arc;

use armt::answer::end_tokens;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{aside, json_of};
use crate::app::App;
use crate::refusal::Reply;

#[derive(Deserialize)]
struct Text {
    #[serde(alias = "content", alias = "text")]
    prompt: String,
}

pub async fn tokenize(State(app): State<Arc<App>>, body: Body) -> Reply<Response> {
    let (Text { prompt }, room) = json_of(&app, body).await?;
    // Of a long text the numbers take as long to write as to find.
    aside(prompt.len(), move || {
        let _room = room;
        let tokens = app.empty.tokenizer().encode(&prompt)?;
        Ok(Json(json!({ "count": tokens.len(), "tokens": tokens, "max_model_len": i32::MAX })).into_response())
    })
    .await
}

#[derive(Deserialize)]
struct Tokens {
    tokens: Vec<i32>,
}

pub async fn detokenize(State(app): State<Arc<App>>, body: Body) -> Reply<Response> {
    let (Tokens { tokens }, room) = json_of(&app, body).await?;
    aside(4 * tokens.len(), move || {
        let _room = room;
        let text = app.empty.tokenizer().decode(&tokens)?;
        Ok(Json(json!({ "prompt": text })).into_response())
    })
    .await
}

pub async fn info(State(app): State<Arc<App>>) -> Reply<Json<Value>> {
    let tokenizer = app.empty.tokenizer();
    let end = end_tokens(app.empty.model(), tokenizer).find_map(|token| tokenizer.name(token));
    Ok(Json(json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "bos_token": end,
        "pad_token": end,
        "vocab_size": tokenizer.vocabulary(),
        "chat_template": app.chat.as_ref().map(crate::template::Template::source),
    })))
}
