//! How conversations are written for a model: the chat template of its folder.

use std::path::Path;

use minijinja::{Environment, Error, ErrorKind, context};
use serde_json::{Value, json};

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
        let refused = |e: Error| {
            std::io::Error::new(std::io::ErrorKind::InvalidData, format!("the chat template of {}: {e}", folder.display()))
        };
        template.render(&[("user".into(), "?".into())]).map_err(refused)?;
        Ok(Some(template))
    }

    /// The template's own text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// A conversation, of roles and what they say, as the model wants it, up to where it is to speak.
    pub fn render(&self, messages: &[(String, String)]) -> Result<String, Error> {
        let mut environment = Environment::new();
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.add_function("raise_exception", |what: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, what))
        });
        let messages: Vec<Value> = messages.iter().map(|(role, content)| json!({ "role": role, "content": content })).collect();
        environment.render_str(
            &self.source,
            context! { messages, add_generation_prompt => true, bos_token => self.begin, eos_token => self.end },
        )
    }
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
        let said = [("system", "Be brief."), ("user", " Hi ")].map(|(role, text)| (role.to_string(), text.to_string()));
        let text = template.render(&said).unwrap();
        assert_eq!(text, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
        assert_eq!((template.begin.as_str(), template.end.as_str()), ("<s>", "<|im_end|>"));
        std::fs::write(folder.path().join("chat_template.jinja"), "{% for %}").unwrap();
        assert!(Template::find(folder.path()).is_err());
    }
}
