//! `/v1/chat/completions`, where the model's folder has a chat template.

use std::path::Path;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use minijinja::{Environment, Error, ErrorKind, context};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::completions::{head, reason, streamed, usage};
use super::json_of;
use super::memories::How;
use crate::App;
use crate::asking::Question;
use crate::keys::Client;
use crate::refusal::{Refusal, Reply};

/// How a model wants a conversation written: Jinja, as Hugging Face folders have it.
pub struct Template {
    source: String,
    begin: String,
    end: String,
}

impl Template {
    /// The template of a folder: `chat_template.jinja`, or a key of `tokenizer_config.json`. One that is no template is an error.
    pub fn find(folder: &Path) -> std::io::Result<Option<Self>> {
        let config: Value = match std::fs::read(folder.join("tokenizer_config.json")) {
            Ok(bytes) => serde_json::from_slice(&bytes)?,
            Err(_) => Value::Null,
        };
        let own = std::fs::read_to_string(folder.join("chat_template.jinja")).ok();
        let Some(source) = own.or_else(|| config["chat_template"].as_str().map(String::from)) else { return Ok(None) };
        let token = |key: &str| config[key].as_str().or(config[key]["content"].as_str()).unwrap_or_default().to_string();
        let template = Template { source, begin: token("bos_token"), end: token("eos_token") };
        let message = Message { role: "user".into(), content: Content::Text("?".into()) };
        let refused = |e: Error| {
            std::io::Error::new(std::io::ErrorKind::InvalidData, format!("the chat template of {}: {e}", folder.display()))
        };
        template.render(&[message]).map_err(refused)?;
        Ok(Some(template))
    }

    /// The template's own text.
    pub fn source(&self) -> &str {
        &self.source
    }

    fn render(&self, messages: &[Message]) -> Result<String, Error> {
        let mut environment = Environment::new();
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.add_function("raise_exception", |what: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, what))
        });
        let messages: Vec<Value> = messages.iter().map(|m| json!({ "role": m.role, "content": m.content.text() })).collect();
        environment.render_str(
            &self.source,
            context! { messages, add_generation_prompt => true, bos_token => self.begin, eos_token => self.end },
        )
    }
}

#[derive(Deserialize)]
pub struct Chat {
    messages: Vec<Message>,
    max_completion_tokens: Option<usize>,
    memory: Option<String>,
    n: Option<usize>,
    #[serde(flatten)]
    how: How,
}

#[derive(Deserialize, Serialize)]
struct Message {
    role: String,
    content: Content,
}

#[derive(Deserialize, Serialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize, Serialize)]
struct Part {
    text: String,
}

impl Content {
    fn text(&self) -> String {
        match self {
            Content::Text(text) => text.clone(),
            Content::Parts(parts) => parts.iter().map(|part| part.text.as_str()).collect(),
        }
    }
}

pub async fn complete(State(app): State<Arc<App>>, Extension(client): Extension<Client>, body: Body) -> Reply<Response> {
    let template = app.chat.as_ref().ok_or_else(|| Refusal::missing("path: the model's folder has no chat template"))?;
    let Chat { messages, max_completion_tokens, memory, n, mut how } = json_of(&app, body).await?;
    if n.is_some_and(|n| n != 1) {
        return Err(Refusal::field("n", "expected 1"));
    }
    how.max_tokens = how.max_tokens.or(max_completion_tokens);
    let text = template.render(&messages).map_err(|e| Refusal::field("messages", e.to_string()))?;
    let session = match memory {
        Some(id) => app.memories.get(&id, client)?.now().session,
        None => Arc::new(app.empty.fork()),
    };
    let prompt = session.tokenizer().encode(&text)?;
    let (options, stop, read) = (how.options(&app, 512, 1.0)?, how.stop(), prompt.len());
    let most = options.max_new_tokens;
    let question = Question { session, prompt, options, stop, listener: None };
    if how.stream.unwrap_or(false) {
        let choice = |text: String, reason: Option<&str>| {
            let delta = if text.is_empty() { json!({}) } else { json!({ "role": "assistant", "content": text }) };
            json!([{ "index": 0, "delta": delta, "finish_reason": reason }])
        };
        let head = head(&app, "chatcmpl", "chat.completion.chunk");
        return Ok(streamed(app, question, head, choice));
    }
    let answer = app.questions.ask(question).await?;
    let message = json!({ "role": "assistant", "content": answer.text });
    let mut reply = head(&app, "chatcmpl", "chat.completion");
    let said = answer.tokens.len();
    reply.insert("choices".into(), json!([{ "index": 0, "message": message, "finish_reason": reason(said, most) }]));
    reply.insert("usage".into(), usage([read, said]));
    Ok(Json(reply).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_is_written_as_the_folder_says() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Template::find(folder.path()).unwrap().is_none());
        let source = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'].strip() + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
        let config = json!({ "chat_template": source, "eos_token": "<|im_end|>", "bos_token": { "content": "<s>" } });
        std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let template = Template::find(folder.path()).unwrap().unwrap();
        let message = |role: &str, content| Message { role: role.into(), content };
        let parts = Content::Parts(vec![Part { text: " Hi ".into() }]);
        let text = template.render(&[message("system", Content::Text("Be brief.".into())), message("user", parts)]).unwrap();
        assert_eq!(text, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
        assert_eq!((template.begin.as_str(), template.end.as_str()), ("<s>", "<|im_end|>"));
        std::fs::write(folder.path().join("chat_template.jinja"), "{% for %}").unwrap();
        assert!(Template::find(folder.path()).is_err());
    }
}
