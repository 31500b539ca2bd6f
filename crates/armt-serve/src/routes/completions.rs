//! `/v1/completions`, as OpenAI's clients and lm-evaluation-harness speak it. A prompt of any length is read into a memory: an empty one,
//! or that of `memory`.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use armt::Session;
use armt::answer::Answer;
use armt::generate::{Generated, Options, generate};
use armt::segment::Batch;
use armt::text::Tokenizer;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use super::memories::How;
use super::{aside, events, json_of, received, refuse_undone};
use crate::app::App;
use crate::asking::Question;
use crate::keys::Client;
use crate::memory::InUse;
use crate::refusal::{Refusal, Reply};

/// Most alternatives of a token.
const ALTERNATIVES: usize = 20;
/// Most prompts of a request.
const PROMPTS: usize = 256;
/// Most tokens of a prompt whose probabilities are told, each counted once for itself and once for every alternative.
const TOLD: usize = 1 << 20;

#[derive(Deserialize)]
pub struct Complete {
    prompt: Prompts,
    echo: Option<bool>,
    logprobs: Option<usize>,
    memory: Option<String>,
    n: Option<usize>,
    best_of: Option<usize>,
    suffix: Option<String>,
    #[serde(flatten)]
    how: How,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "prompt: expected a text, a list of texts, a list of tokens, or a list of such lists")]
enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<i32>),
    TokenLists(Vec<Vec<i32>>),
}

/// One of them.
struct Prompt {
    tokens: Vec<i32>,
    /// As it was sent, where it was a text.
    text: Option<String>,
}

impl Prompts {
    /// About how many bytes they are.
    fn size(&self) -> usize {
        match self {
            Prompts::Text(text) => text.len(),
            Prompts::Texts(texts) => texts.iter().map(String::len).sum(),
            Prompts::Tokens(tokens) => tokens.len(),
            Prompts::TokenLists(lists) => lists.iter().map(Vec::len).sum(),
        }
    }

    fn tokens(self, app: &App) -> Reply<Vec<Prompt>> {
        let encode = |text: String| Ok(Prompt { tokens: app.empty.tokenizer().encode(&text)?, text: Some(text) });
        let given = |tokens: Vec<i32>| Prompt { tokens, text: None };
        let prompts: Vec<Prompt> = match self {
            Prompts::Text(text) => vec![encode(text)?],
            Prompts::Texts(texts) => texts.into_iter().map(encode).collect::<armt::Result<_>>()?,
            Prompts::Tokens(tokens) => vec![given(tokens)],
            Prompts::TokenLists(lists) => lists.into_iter().map(given).collect(),
        };
        let vocabulary = app.empty.model().sizes().vocab;
        if prompts.is_empty() || prompts.len() > PROMPTS {
            return Err(Refusal::field("prompt", format!("expected 1 to {PROMPTS} prompts, got {}", prompts.len())));
        }
        if prompts.iter().any(|prompt| prompt.tokens.is_empty()) {
            return Err(Refusal::field("prompt", "expected at least one token, got none"));
        }
        let mut tokens = prompts.iter().flat_map(|prompt| &prompt.tokens);
        if let Some(token) = tokens.find(|token| usize::try_from(**token).map_or(true, |t| t >= vocabulary)) {
            return Err(Refusal::field("prompt", format!("token {token} is outside the vocabulary of {vocabulary}")));
        }
        Ok(prompts)
    }
}

pub async fn complete(State(app): State<Arc<App>>, Extension(client): Extension<Client>, body: Body) -> Reply<Response> {
    let (request, room): (Complete, _) = json_of(&app, body).await?;
    for (name, n) in [("n", request.n), ("best_of", request.best_of)] {
        if n.is_some_and(|n| n != 1) {
            return Err(Refusal::field(name, "expected 1"));
        }
    }
    refuse_undone(&request.others)?;
    if request.suffix.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(Refusal::field("suffix", "expected none: the model goes forward only"));
    }
    if request.logprobs.is_some_and(|n| n > ALTERNATIVES) {
        return Err(Refusal::field("logprobs", format!("expected at most {ALTERNATIVES}")));
    }
    let memory = request.memory.as_ref().map(|id| app.memories.get(id, client)).transpose()?;
    let session = memory.as_ref().map_or_else(|| Arc::new(app.empty.fork()), |memory| memory.now().session);
    let prompts = {
        let size = request.prompt.size();
        let (app, prompt, room) = (app.clone(), request.prompt, room.clone());
        let encode = move || {
            let _room = room;
            prompt.tokens(&app)
        };
        aside(size, encode).await?
    };
    let echo = request.echo.unwrap_or(false);
    let told = request.logprobs.map_or(0, |n| n + 1);
    if echo && prompts.iter().map(|prompt| prompt.tokens.len()).sum::<usize>() * told > TOLD {
        let most = TOLD / told;
        return Err(Refusal::too_long("prompt", format!("expected at most {most} tokens with echo and so many logprobs")));
    }
    let (options, stop) = (request.how.options(&app, 16, 1.0)?, request.how.stop());
    let head = head(&app, "cmpl", "text_completion");
    if request.how.stream.unwrap_or(false) {
        if prompts.len() > 1 || echo || request.logprobs.is_some() {
            return Err(Refusal::field("stream", "expected false with several prompts, echo or logprobs"));
        }
        let choice =
            |text: String, reason: Option<&str>| json!([{ "index": 0, "text": text, "logprobs": null, "finish_reason": reason }]);
        let prompt = prompts.into_iter().next().map(|prompt| prompt.tokens).unwrap_or_default();
        let question = Question { session, prompt, options, stop, listener: None, _room: room };
        return Ok(streamed(app, memory, question, head, choice, request.how.wants_usage()));
    }
    let (mut choices, mut used) = (Vec::new(), [0, 0]);
    for (index, prompt) in prompts.into_iter().enumerate() {
        used[0] += prompt.tokens.len();
        let (text, said, reason, logprobs) = if echo || request.logprobs.is_some() {
            let (session, options, stop) = (session.clone(), options.clone(), stop.clone());
            let alternatives = request.logprobs;
            let room = room.clone();
            let done = app.questions.work(move |gone| {
                let _room = room;
                let options = Options { interrupt: Some(gone.clone()), ..options };
                scored(&session, &prompt, echo, alternatives, &options, &stop)
            });
            done.await.inspect(|(_, said, ..)| app.questions.tally(*said, Duration::ZERO))?
        } else {
            let (session, options, stop, room) = (session.clone(), options.clone(), stop.clone(), room.clone());
            let question = Question { session, prompt: prompt.tokens, options, stop, listener: None, _room: room };
            let answer = app.questions.ask(question).await?;
            let reason = reason(&answer);
            (answer.text, answer.tokens.len(), reason, Value::Null)
        };
        used[1] += said;
        choices.push(json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": reason }));
    }
    let mut reply = head;
    reply.insert("choices".into(), choices.into());
    reply.insert("usage".into(), usage(used));
    Ok(Json(reply).into_response())
}

pub fn usage([prompt, said]: [usize; 2]) -> Value {
    json!({ "prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said })
}

/// Why an answer ended.
pub fn reason(answer: &Answer) -> &'static str {
    if answer.ended { "stop" } else { "length" }
}

/// What replies of all kinds begin with.
pub fn head(app: &App, kind: &str, object: &str) -> Map<String, Value> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let fields = [
        ("id", json!(format!("{kind}-{:x}", now.as_nanos()))),
        ("object", json!(object)),
        ("created", json!(now.as_secs())),
        ("model", json!(app.name)),
    ];
    fields.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
}

/// An answer as it comes, of a memory that stays meanwhile; `choice` makes of a piece of it, or of its end, what the endpoint tells. `with_usage` tells at the end how many tokens
/// there were.
pub fn streamed(
    app: Arc<App>,
    memory: Option<InUse>,
    question: Question,
    head: Map<String, Value>,
    choice: impl Fn(String, Option<&str>) -> Value + Send + Sync + 'static,
    with_usage: bool,
) -> Response {
    let asked = question.prompt.len();
    let (say, said) = mpsc::unbounded_channel();
    let event = move |text: String, reason: Option<&str>| {
        let mut event = head.clone();
        event.insert("choices".into(), choice(text, reason));
        Value::Object(event)
    };
    tokio::spawn(async move {
        let _memory = memory;
        let Some(answer) = app.questions.tell(question, &say, |text| event(text, None)).await else { return };
        match answer {
            Ok(answer) => {
                let mut last = event(String::new(), Some(reason(&answer)));
                let _ = say.send(last.clone());
                if with_usage {
                    (last["choices"], last["usage"]) = (json!([]), usage([asked, answer.tokens.len()]));
                    let _ = say.send(last);
                }
            }
            Err(refusal) => drop(say.send(refusal.body())),
        }
        let _ = say.send(Value::Null);
    });
    events(received(said))
}

/// A token's own logarithm of its probability, and the most probable ones.
struct Scored {
    token: i32,
    own: Option<f32>,
    top: Vec<(i32, f32)>,
}

/// Tokens with their probabilities: of the prompt, if it is to be told too, and of what comes after it.
fn scored(
    session: &Session,
    prompt: &Prompt,
    echo: bool,
    alternatives: Option<usize>,
    options: &Options,
    stop: &[String],
) -> Reply<(String, usize, &'static str, Value)> {
    let (model, tokenizer) = (session.model(), session.tokenizer());
    let top = alternatives.unwrap_or(0);
    let mut scores = if echo { score_prompt(session, &prompt.tokens, top, options)? } else { Vec::new() };
    let (mut text, mut said, mut why) = (String::new(), 0, "length");
    if echo {
        text = match &prompt.text {
            Some(text) => text.clone(),
            None => prompt_text(tokenizer, &prompt.tokens)?,
        };
    }
    if options.max_new_tokens > 0 {
        let ends = armt::answer::end_tokens(model, tokenizer).collect();
        let options = Options { keep_logits: true, stop: ends, ..options.clone() };
        let batch = Batch { ids: prompt.tokens.clone(), texts: 1, mask: None };
        let Generated { tokens, logits, .. } = generate(model, &batch, session.closed()?, &options, &mut |_| {})?;
        let mut speech = tokenizer.speech();
        // Behind the prompt, where that is told, it may begin with a space that it would not have alone.
        for token in prompt.tokens.iter().filter(|_| echo) {
            speech.say(*token)?;
        }
        let mut answer = String::new();
        for (token, logits) in tokens[0].iter().zip(&logits) {
            said += 1;
            scores.push(score(*token, logits, top));
            if options.stop.contains(token) {
                why = "stop";
                break;
            }
            answer.push_str(&speech.say(*token)?);
            if let Some(at) = stop.iter().filter(|s| !s.is_empty()).filter_map(|s| answer.find(s.as_str())).min() {
                answer.truncate(at);
                why = "stop";
                break;
            }
        }
        text.push_str(&answer);
    }
    let logprobs = if alternatives.is_some() { told(session, &scores)? } else { Value::Null };
    Ok((text, said, why, logprobs))
}

/// The first token has nothing to be probable after.
fn score_prompt(session: &Session, prompt: &[i32], top: usize, options: &Options) -> Reply<Vec<Scored>> {
    let model = session.model();
    let batch = Batch { ids: prompt.to_vec(), texts: 1, mask: None };
    let mut state = session.closed()?.clone();
    let mut last: Option<Vec<f32>> = None;
    let mut scores = Vec::with_capacity(prompt.len());
    let vocabulary = model.sizes().vocab;
    for segment in model.segments(&batch)? {
        options.expect_going_on()?;
        let ids = prompt[segment.range.clone()].to_vec();
        let part = Batch { ids: ids.clone(), texts: 1, mask: None };
        let (logits, after) = model.forward(&part, &state, armt::schedule::ScheduleKind::Auto)?;
        state = after;
        let mut rows = logits.chunks(vocabulary);
        for token in ids {
            scores.push(match &last {
                Some(row) => score(token, row, top),
                None => Scored { token, own: None, top: Vec::new() },
            });
            last = rows.next().map(<[f32]>::to_vec);
        }
    }
    Ok(scores)
}

fn score(token: i32, logits: &[f32], top: usize) -> Scored {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - most).exp()).sum();
    let log = |token: usize| (f64::from(logits[token] - most) - sum.ln()) as f32;
    let mut order: Vec<usize> = (0..logits.len()).collect();
    if top > 0 && top < order.len() {
        order.select_nth_unstable_by(top - 1, |a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    }
    order.truncate(top);
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    Scored { token, own: Some(log(token as usize)), top: order.into_iter().map(|t| (t as i32, log(t))).collect() }
}

/// A token by itself: what it says, or the name that the tokenizer's file has for it where that is nothing, or part of a character.
fn word(tokenizer: &Tokenizer, token: i32) -> armt::Result<String> {
    let said = tokenizer.decode(&[token])?;
    let is_whole = !said.is_empty() && !said.contains(char::REPLACEMENT_CHARACTER);
    Ok(if is_whole { said } else { tokenizer.name(token).unwrap_or(said) })
}

/// What each of some tokens adds to their text: a character comes with the last of its tokens, and a token that says nothing is there by its name.
fn pieces(tokenizer: &Tokenizer, tokens: impl Iterator<Item = i32>) -> armt::Result<Vec<String>> {
    let mut speech = tokenizer.speech();
    let piece = |token| {
        let said = speech.say(token)?;
        let is_special = said.is_empty() && tokenizer.decode(&[token])?.is_empty();
        Ok(if is_special { word(tokenizer, token)? } else { said })
    };
    tokens.map(piece).collect()
}

/// The text of a prompt that was sent as tokens.
fn prompt_text(tokenizer: &Tokenizer, tokens: &[i32]) -> armt::Result<String> {
    Ok(pieces(tokenizer, tokens.iter().copied())?.concat())
}

fn told(session: &Session, scores: &[Scored]) -> Reply<Value> {
    let tokenizer = session.tokenizer();
    let (mut tokens, mut own, mut top, mut offsets, mut at) = (Vec::new(), Vec::new(), Vec::new(), Vec::new(), 0);
    let pieces = pieces(tokenizer, scores.iter().map(|score| score.token))?;
    for (score, piece) in scores.iter().zip(pieces) {
        let said = word(tokenizer, score.token)?;
        offsets.push(at);
        at += piece.chars().count();
        own.push(score.own);
        // The most probable of those that read alike, and in any case the token itself.
        let mut others = Map::new();
        for (token, log) in &score.top {
            others.entry(word(tokenizer, *token)?).or_insert_with(|| json!(log));
        }
        if let (Some(log), false) = (score.own, score.top.is_empty()) {
            others.insert(said.clone(), json!(log));
        }
        tokens.push(said);
        top.push(score.own.map(|_| others));
    }
    Ok(json!({ "tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets }))
}
