//! `POST /v1/memories/ID/text`: text of any length into a memory, as it comes.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use super::memories::kept;
use super::{Id, Pieces, events, received, tokens_read, wants_events};
use crate::app::App;
use crate::keys::Client;
use crate::memory::{Known, Memory};
use crate::reading::{Sending, TextProgress};
use crate::refusal::{Refusal, Reply};

/// Most characters of an `Idempotency-Key`: a memory keeps them.
const LONGEST_KEY: usize = 255;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Onto {
    /// Bytes of the text that come before this body.
    offset: Option<u64>,
}

pub async fn text(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Id(id): Id,
    query: Result<Query<Onto>, QueryRejection>,
    headers: HeaderMap,
    body: Body,
) -> Reply<Response> {
    let memory = app.memories.get(&id, client)?;
    let Query(Onto { offset }) = query.map_err(|e| Refusal::field("offset", e.body_text()))?;
    if headers.get(header::CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
        return Err(Refusal::form("expected a text as it is, without a Content-Encoding"));
    }
    let key = headers.get("idempotency-key").map(|key| key.to_str().map(String::from)).transpose();
    let key = key.map_err(|_| Refusal::invalid("expected an Idempotency-Key of ASCII"))?;
    if let Some(key) = key.as_ref().filter(|key| !(1..=LONGEST_KEY).contains(&key.len())) {
        return Err(Refusal::invalid(format!("expected an Idempotency-Key of 1 to {LONGEST_KEY} characters, got {}", key.len())));
    }
    let as_events = wants_events(&headers);
    let again = move |answer: Value| match as_events {
        true => events(futures_util::stream::iter([json!({ "done": answer })])),
        false => Json(answer).into_response(),
    };
    if let Some(answer) = key.as_deref().and_then(|key| memory.answered(key)) {
        kept(&app, &memory).await?;
        return Ok(again(answer));
    }
    if let Some(keeper) = &app.keeper {
        keeper.expect_room()?;
    }
    let sending = app.readings.begin(&memory)?;
    let progress = sending.progress();
    let before = progress.borrow().now.clone();
    let mut known = match begin(&memory, key.as_deref(), offset, before.text_bytes) {
        Ok(Known::From(from)) => before.text_bytes - from,
        Ok(Known::Answered(answer)) => {
            give_up(sending).await;
            kept(&app, &memory).await?;
            return Ok(again(answer));
        }
        Err(refusal) => {
            give_up(sending).await;
            return Err(refusal);
        }
    };
    let begun = Begun { tokens_read: tokens_read(before).await?, at: Instant::now() };
    let mut pieces = Pieces::new(&app, body);
    let mut heard = sending.progress();
    let send = async move {
        // Whose text goes no further need not send the rest of it.
        while let Some(mut piece) = tokio::select! {
            piece = pieces.next() => piece?,
            why = failure(&mut heard) => return Err(why),
        } {
            // What the memory has of the text already.
            let passed = (piece.len() as u64).min(known);
            known -= passed;
            let piece = piece.split_off(passed as usize);
            if !piece.is_empty() {
                sending.send(piece).await?;
            }
        }
        sending.end();
        Ok::<_, Refusal>(sending)
    };
    let finish = {
        let (app, memory, mut progress) = (app.clone(), memory.clone(), progress.clone());
        async move {
            let last = progress.wait_for(|p| p.done || p.failed.is_some()).await.map(|p| p.clone());
            let last = last.map_err(|_| Refusal::failure("the reading was lost"))?;
            if let Some(why) = &last.failed {
                return Err(why.clone());
            }
            let mut done = begun.told(&last, tokens_read(last.now.clone()).await?);
            done["id"] = memory.id.clone().into();
            done["segments_read"] = last.now.session.state().segments_read().into();
            // In its file it stands before anybody hears it.
            if let Some(key) = &key {
                memory.answer(key, Some(done.clone()));
            }
            if let Err(why) = kept(&app, &memory).await {
                key.iter().for_each(|key| memory.answer(key, None));
                return Err(why);
            }
            Ok(done)
        }
    };
    if !as_events {
        return match send.await {
            Ok(_sent) => Ok(Json(finish.await?).into_response()),
            Err(refusal) => {
                over(progress).await;
                Err(refusal)
            }
        };
    }
    let (say, said) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let _memory = memory;
        let watch = async {
            let mut progress = progress;
            while progress.changed().await.is_ok() {
                let now = progress.borrow_and_update().clone();
                let told = begun.told(&now, now.now.certain_tokens());
                if now.done || now.failed.is_some() || say.send(json!({ "progress": told })).is_err() {
                    break;
                }
            }
        };
        // Whoever has gone away sends nothing more either: the body ends, and what came is read.
        let (sent, ()) = tokio::join!(send, watch);
        let last = match sent {
            Ok(_sent) => finish.await.map_or_else(|refusal| refusal.body(), |done| json!({ "done": done })),
            Err(refusal) => refusal.body(),
        };
        let _ = say.send(last);
    });
    Ok(events(received(said)))
}

/// How a text goes on in a memory that has taken so many bytes: after those of them that were there before it, or not at all.
fn begin(memory: &Memory, key: Option<&str>, offset: Option<u64>, taken: u64) -> Reply<Known> {
    // Its answer may have come since it was looked for, from the same text on another connection.
    if let Some(answer) = key.and_then(|key| memory.answered(key)) {
        return Ok(Known::Answered(answer));
    }
    // Before it counts as a text that has come.
    if let Some(offset) = offset.filter(|offset| *offset > taken) {
        return Err(Refusal::conflict(format!(
            "the memory has {taken} bytes of the text: expected an offset of at most that, got {offset}"
        )));
    }
    match memory.begin_text(key, taken)? {
        Known::From(from) => Ok(Known::From(offset.unwrap_or(from).min(taken))),
        answered => Ok(answered),
    }
}

/// Leaves a text that is not to come after all.
async fn give_up(sending: Sending) {
    let progress = sending.progress();
    drop(sending);
    over(progress).await;
}

/// Waits until what came of a text that has broken off is read: its client may go on at once.
async fn over(mut progress: watch::Receiver<TextProgress>) {
    let _ = progress.wait_for(|p| p.done || p.failed.is_some()).await;
}

/// Why a text goes no further, once it does not.
async fn failure(progress: &mut watch::Receiver<TextProgress>) -> Refusal {
    let failed = progress.wait_for(|p| p.failed.is_some()).await.ok().and_then(|p| p.failed.clone());
    failed.unwrap_or_else(|| Refusal::failure("the reading was lost"))
}

/// What there was when a text began.
#[derive(Clone, Copy)]
struct Begun {
    tokens_read: u64,
    at: Instant,
}

impl Begun {
    /// What its sender is told of a text when its memory has read so many tokens. They may be fewer than before: its first letters can make one
    /// token of a word that was open.
    fn told(self, progress: &TextProgress, tokens_read: u64) -> Value {
        let (tokens, seconds) = (tokens_read.saturating_sub(self.tokens_read), self.at.elapsed().as_secs_f64());
        json!({
            "tokens": tokens,
            "tokens_read": tokens_read,
            "text_bytes": progress.now.text_bytes,
            "seconds": seconds,
            "tokens_per_second": (tokens as f64 / seconds.max(1e-9)).round(),
            "change": progress.change.as_ref().map(|c| c.layers.clone()),
        })
    }
}
