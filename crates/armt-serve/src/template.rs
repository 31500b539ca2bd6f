//! How conversations are written for a model: the chat template of its folder.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

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
        // One, or a list of some with names.
        let named = || config["chat_template"].as_array()?.iter().find(|one| one["name"] == "default")?["template"].as_str();
        let Some(source) = own.or_else(|| config["chat_template"].as_str().or_else(named).map(String::from)) else {
            return Ok(None);
        };
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
        environment.add_function("strftime_now", |form: String| strftime_now(&form));
        let messages: Vec<Value> = messages.iter().map(|(role, content)| json!({ "role": role, "content": content })).collect();
        environment.render_str(
            &without_marks(self.source.clone()),
            context! { messages, add_generation_prompt => true, bos_token => self.begin, eos_token => self.end },
        )
    }
}

/// A template without the marks of what the assistant says, which Hugging Face's own Jinja knows and training alone needs: as comments.
fn without_marks(mut source: String) -> String {
    for tag in ["generation", "endgeneration"] {
        for (open, close) in [("{%", "%}"), ("{%-", "%}"), ("{%", "-%}"), ("{%-", "-%}")] {
            let mark = format!("{open} {tag} {close}");
            source = source.replace(&mark, &mark.replace('%', "#"));
        }
    }
    source
}

const MONTHS: [&str; 12] =
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];

/// The time now, in UTC, in the form of `strftime`: what templates ask for of it.
fn strftime_now(form: &str) -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    strftime(form, seconds)
}

fn strftime(form: &str, seconds: u64) -> String {
    let (mut day, mut year) = (seconds / 86_400, 1970);
    let is_leap = |year: u64| year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    while day >= 365 + u64::from(is_leap(year)) {
        day -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let mut month = 0;
    for days in [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if day < days {
            break;
        }
        day -= days;
        month += 1;
    }
    let clock = seconds % 86_400;
    let (mut said, mut letters) = (String::new(), form.chars());
    while let Some(letter) = letters.next() {
        match (letter, if letter == '%' { letters.next() } else { None }) {
            ('%', Some('Y')) => said += &year.to_string(),
            ('%', Some('m')) => said += &format!("{:02}", month + 1),
            ('%', Some('B')) => said += MONTHS[month],
            ('%', Some('b')) => said += &MONTHS[month][..3],
            ('%', Some('d')) => said += &format!("{:02}", day + 1),
            ('%', Some('H')) => said += &format!("{:02}", clock / 3_600),
            ('%', Some('M')) => said += &format!("{:02}", clock / 60 % 60),
            ('%', Some('S')) => said += &format!("{:02}", clock % 60),
            ('%', Some('%')) => said.push('%'),
            (letter, other) => said.extend([Some(letter), other].into_iter().flatten()),
        }
    }
    said
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
        // What Hugging Face's own Jinja has beside.
        std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
        let source = "{{ strftime_now('%Y') | length }}{% for m in messages %} {%- generation -%} {{ m.content }} {% endgeneration %}{% endfor %}";
        let named = json!([{ "name": "tools", "template": "?" }, { "name": "default", "template": source }]);
        std::fs::write(folder.path().join("tokenizer_config.json"), json!({ "chat_template": named }).to_string()).unwrap();
        let template = Template::find(folder.path()).unwrap().unwrap();
        assert_eq!(template.render(&said[1..]).unwrap(), "4 Hi  ");
    }

    #[test]
    fn times_are_written_as_strftime_does() {
        for (seconds, said) in [
            (0, "01 Jan 1970 00:00:00, January, 01, 100 %"),
            (951_782_399, "28 Feb 2000 23:59:59, February, 02, 100 %"),
            (951_782_400, "29 Feb 2000 00:00:00, February, 02, 100 %"),
            (4_102_444_799, "31 Dec 2099 23:59:59, December, 12, 100 %"),
        ] {
            assert_eq!(strftime("%d %b %Y %H:%M:%S, %B, %m, 100 %%", seconds), said);
        }
    }
}
