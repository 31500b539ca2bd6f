//! The server as clients meet it: what it gives is what the library gives, to the bit, and nobody gets what is not theirs.

#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Cursor, Write};
use std::time::Duration;

use armt::engine::{DType, Device};
use armt::generate::Options;
use armt::memory::{MemoryConfig, RmtR};
use armt::{Model, Session};
use armt_serve::keys::Keys;
use armt_serve::{ROUTES, Server, Settings};
use serde_json::{Value, json};
use support::{Running, book, read, read_reply, session, settings};

#[test]
fn the_description_has_every_route_and_every_route_answers() {
    let server = Running::start(settings());
    let client = server.client();
    let described = client.get("/openapi.json").json();
    let paths = described["paths"].as_object().unwrap();
    let mut told: Vec<(&str, Vec<&str>)> = paths
        .iter()
        .map(|(path, methods)| (path.as_str(), methods.as_object().unwrap().keys().map(String::as_str).collect()))
        .collect();
    let mut routes: Vec<(&str, Vec<&str>)> = ROUTES.iter().map(|(path, methods)| (*path, methods.to_vec())).collect();
    told.iter_mut().for_each(|(_, methods)| methods.sort_unstable());
    routes.iter_mut().for_each(|(_, methods)| methods.sort_unstable());
    told.sort();
    routes.sort();
    assert_eq!(told, routes);
    for (path, methods) in ROUTES {
        for method in methods {
            let said = client.call(&method.to_uppercase(), &path.replace("{id}", &client.memory()), &[], b"");
            let unknown = said.status == 405 || said.text().contains("no such path\"");
            assert!(!unknown, "{method} {path}: {} {}", said.status, said.text());
            if let Some(kind) = said.header("content-type").filter(|_| (200..300).contains(&said.status)) {
                let kinds = &paths[path][*method]["responses"][said.status.to_string()]["content"];
                assert!(kinds.get(kind.split(';').next().unwrap()).is_some(), "{method} {path}: {kind} is not in {kinds}");
            }
        }
    }
    assert_eq!(client.get("/v1/nothing").status, 404);
    let page = client.get("/");
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.contains("default-src 'none'") && page.text().contains("Read a book"), "{policy}");
    assert!(!page.text().contains("http://") && !page.text().contains("https://"), "the page needs no network");
}

#[test]
fn a_memory_is_added_to_in_any_pieces_asked_forked_moved_and_deleted() {
    let server = Running::start(settings());
    let client = server.client();
    let text = book(0, 6_000);
    let id = client.memory();
    // Cut within words and characters too.
    let mut at = 0_usize;
    for step in [1, 2, 700, 3, 4_001, 5, usize::MAX] {
        let end = text.len().min(at.saturating_add(step));
        client.add(&id, &text.as_bytes()[at..end]);
        at = end;
    }
    let alone = read(&text);
    assert_eq!(client.file(&id), alone.to_bytes().unwrap());
    let told = client.get(&format!("/v1/memories/{id}")).json();
    assert_eq!(told["tokens_read"], alone.tokens_read().unwrap());
    assert_eq!((told["text_bytes"].as_u64(), &told["reading"]), (Some(text.len() as u64), &json!(false)));
    assert!(told["changes"].as_array().is_some_and(|c| !c.is_empty()) && told["norms"][0][0].as_f64() > Some(0.0));

    let answer = client.ask(&id, "Where is Mary?");
    assert_eq!(answer["answer"], alone.ask("Where is Mary?").unwrap());
    assert_eq!(answer["answer"], "kitchen");
    assert!(answer["probability"].as_f64().is_some_and(|p| p > 0.0 && p <= 1.0));
    assert_eq!(client.file(&id), alone.to_bytes().unwrap(), "a question changes nothing");

    let fork = client.post("/v1/memories", &json!({ "from": id, "name": "fork" })).json();
    let fork = fork["id"].as_str().unwrap();
    assert_eq!(client.file(fork), client.file(&id));
    client.add(fork, b"Mary journeyed to the office.");
    assert_eq!(
        (client.ask(fork, "Where is Mary?")["answer"].as_str(), client.ask(&id, "Where is Mary?")["answer"].as_str()),
        (Some("office"), Some("kitchen"))
    );

    let moved = client.memory();
    let file = client.file(fork);
    let said = client.call("PUT", &format!("/v1/memories/{moved}/file"), &[], &file);
    assert_eq!((said.status, client.file(&moved)), (200, file));

    assert_eq!(client.get("/v1/memories").json()["data"].as_array().unwrap().len(), 3);
    assert_eq!(client.call("DELETE", &format!("/v1/memories/{fork}"), &[], b"").status, 204);
    assert_eq!(client.get(&format!("/v1/memories/{fork}")).status, 404);
    assert_eq!(client.get("/v1/memories").json()["data"].as_array().unwrap().len(), 2);
}

#[test]
fn a_text_that_broke_off_goes_on_and_one_that_came_twice_counts_once() {
    let server = Running::start(settings());
    let client = server.client();
    let text = book(5, 9_000);
    let id = client.memory();
    let path = format!("/v1/memories/{id}/text");
    // A client that goes away in the middle.
    let mut stream = client.connect();
    stream.write_all(&client.request("POST", &path, &[], Some(text.len()))).unwrap();
    stream.write_all(&text.as_bytes()[..5_000]).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    drop(stream);
    let mut taken = 0;
    for _ in 0..100 {
        let told = client.get(&format!("/v1/memories/{id}")).json();
        taken = told["text_bytes"].as_u64().unwrap();
        if told["reading"] == false {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(taken, 5_000, "what came is read");
    let beyond = client.call("POST", &format!("{path}?offset=5001"), &[], b"x");
    assert_eq!(beyond.status, 409, "{}", beyond.text());
    let said = client.call("POST", &format!("{path}?offset=0"), &[("Idempotency-Key", "once")], text.as_bytes());
    assert_eq!(said.status, 200, "{}", said.text());
    let again = client.call("POST", &path, &[("Idempotency-Key", "once")], text.as_bytes());
    assert_eq!(said.json(), again.json());
    assert_eq!(client.file(&id), read(&text).to_bytes().unwrap());
}

#[test]
fn a_word_that_goes_on_may_be_fewer_tokens() {
    let server = Running::start(settings());
    let client = server.client();
    let id = client.memory();
    let [begun, whole] = ["Mary went to the kitche", "n"].map(|text| client.add(&id, text.as_bytes()));
    let tokens = |text: &str| read(text).tokens_read().unwrap();
    assert_eq!(begun["tokens_read"], tokens("Mary went to the kitche"));
    assert_eq!(whole["tokens_read"], tokens("Mary went to the kitchen"));
    assert!(whole["tokens_read"].as_u64() < begun["tokens_read"].as_u64(), "or this test shows nothing");
    assert_eq!((&whole["tokens"], whole["tokens_per_second"].as_f64()), (&json!(0), Some(0.0)));
}

#[test]
fn progress_comes_as_events_and_documents_can_be_set_apart() {
    let server = Running::start(settings());
    let client = server.client();
    let (one, two) = (book(1, 40_000), book(6, 3_000));
    let id = client.memory();
    let said = client.call("POST", &format!("/v1/memories/{id}/text"), &[("Accept", "text/event-stream")], one.as_bytes());
    let events = said.events();
    let last = &events.last().unwrap()["done"];
    assert_eq!(last["text_bytes"], one.len());
    assert!(events.len() > 1 && events[0]["progress"]["tokens"].as_u64() > Some(0), "{events:?}");
    assert_eq!(client.post(&format!("/v1/memories/{id}/end"), &json!({})).status, 200);
    client.add(&id, two.as_bytes());
    let mut alone = read(&one);
    alone.end_document().unwrap();
    alone.read_from("the text", Cursor::new(two.into_bytes())).unwrap();
    assert_eq!(client.file(&id), alone.to_bytes().unwrap());
}

#[test]
fn many_clients_read_and_ask_side_by_side_and_each_gets_its_own() {
    let server = Running::start(settings());
    let client = server.client();
    let run = |seed: usize| {
        let client = client.clone();
        move || {
            let text = book(seed, 1_500 * (1 + seed * seed % 11));
            let id = client.memory();
            for piece in text.as_bytes().chunks(2_111) {
                client.add(&id, piece);
            }
            let who = ["Mary", "John", "Sandra", "Daniel"][seed % 4];
            let question = format!("Where is {who}?");
            (text, client.file(&id), question.clone(), client.ask(&id, &question))
        }
    };
    let threads: Vec<_> = (0..12).map(|seed| std::thread::spawn(run(seed))).collect();
    for thread in threads {
        let (text, file, question, answer) = thread.join().unwrap();
        let alone = read(&text);
        assert_eq!(file, alone.to_bytes().unwrap());
        assert_eq!(answer["answer"], alone.ask(&question).unwrap());
    }
    let metrics = client.get("/metrics").text();
    assert!(metrics.contains("armt_memories 12\n") && metrics.contains("armt_answers_total 12\n"), "{metrics}");
}

#[test]
fn completions_are_those_of_the_library() {
    let server = Running::start(settings());
    let client = server.client();
    let session = session();
    let prompt = format!("{} Where is Mary?GEN", book(0, 9_000));
    let options =
        Options { max_new_tokens: 4, stop: session.tokenizer().end_of_text().into_iter().collect(), ..Options::default() };
    let own = session.generate(&prompt, &options).unwrap();
    let text = client.post("/v1/completions", &json!({ "prompt": prompt, "max_tokens": 4, "temperature": 0 })).json();
    assert_eq!(text["choices"][0]["text"], "kitchen");
    assert_eq!(text["usage"]["prompt_tokens"], session.tokenizer().encode(&prompt).unwrap().len());
    assert_eq!(text["choices"][0]["finish_reason"], "stop");

    // As lm-evaluation-harness asks: tokens in, everything told, one more.
    let tokens = session.tokenizer().encode(&prompt).unwrap();
    let body = json!({ "prompt": [tokens, [1, 2, 3]], "max_tokens": 1, "temperature": 0, "echo": true, "logprobs": 1 });
    let said = client.post("/v1/completions", &body).json();
    let logprobs = &said["choices"][0]["logprobs"];
    let own_logs = logprobs["token_logprobs"].as_array().unwrap();
    assert_eq!((own_logs.len(), &own_logs[0]), (tokens.len() + 1, &Value::Null));
    assert_eq!(logprobs["top_logprobs"].as_array().unwrap().len(), tokens.len() + 1);
    let last = own_logs.last().unwrap().as_f64().unwrap();
    assert!((last.exp() - f64::from(own.probabilities[0][0])).abs() < 1e-5, "{last}");
    assert!(own_logs[1..].iter().all(|log| log.as_f64().is_some_and(|log| log <= 0.0)));
    assert_eq!(said["choices"][1]["logprobs"]["tokens"].as_array().unwrap().len(), 4);

    let streamed = client.post("/v1/completions", &json!({ "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": true }));
    let events = streamed.events();
    let told: String = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!((told.as_str(), events.last()), ("kitchen", Some(&Value::Null)));

    let random = |seed: u64| {
        client.post("/v1/completions", &json!({ "prompt": "Mary", "max_tokens": 8, "seed": seed })).json()["choices"][0]["text"]
            .clone()
    };
    assert_eq!(random(7), random(7));

    let id = client.memory();
    client.add(&id, book(0, 2_000).as_bytes());
    let body = json!({ "prompt": "Where is Mary?GEN", "max_tokens": 4, "temperature": 0, "memory": id });
    assert_eq!(client.post("/v1/completions", &body).json()["choices"][0]["text"], "kitchen");
    let streamed = client.post(&format!("/v1/memories/{id}/ask"), &json!({ "question": "Where is Mary?", "stream": true }));
    assert_eq!(streamed.events().iter().filter_map(|e| e["text"].as_str()).collect::<String>(), "kitchen");
    let stopped =
        client.post(&format!("/v1/memories/{id}/ask"), &json!({ "question": "Where is Mary?", "stop": "tch", "logprobs": true }));
    assert_eq!(stopped.json()["answer"], "ki");

    let tokens = client.post("/tokenize", &json!({ "prompt": "Mary went" })).json()["tokens"].clone();
    assert_eq!(client.post("/detokenize", &json!({ "tokens": tokens })).json()["prompt"], "Mary went");
}

#[test]
fn a_conversation_needs_a_template() {
    let server = Running::start(settings());
    let body = json!({ "messages": [{ "role": "user", "content": "Mary went to the garden. Where is Mary?" }], "temperature": 0 });
    assert_eq!(server.client().post("/v1/chat/completions", &body).status, 404);
    let with = tempfile::tempdir().unwrap();
    let template = "{% for m in messages %}{{ m['content'] }}{% endfor %}GEN";
    std::fs::write(with.path().join("tokenizer_config.json"), json!({ "chat_template": template }).to_string()).unwrap();
    let mut settings = settings();
    settings.folder = Some(with.path().into());
    let server = Running::start(settings);
    let said = server.client().post("/v1/chat/completions", &body).json();
    assert_eq!(said["choices"][0]["message"]["content"], "garden", "{said}");
    assert_eq!(server.client().post("/v1/chat/completions", &json!({ "messages": [] })).status, 400);
    let mut body = body;
    body["stream"] = true.into();
    let events = server.client().post("/v1/chat/completions", &body).events();
    let told = |field: &str| events.iter().filter_map(|e| e["choices"][0]["delta"][field].as_str()).collect::<String>();
    assert!(events.len() > 3 && told("role") == "assistant" && told("content") == "garden", "{events:?}");
}

#[test]
fn nobody_gets_what_is_not_theirs() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "first-key-of-this-server\nsecond-key-of-this-server\n").unwrap();
    let mut settings = settings();
    settings.keys = Some(Keys::load(file.path()).unwrap());
    let server = Running::start(settings);
    let (first, second) = (server.client_with("first-key-of-this-server"), server.client_with("second-key-of-this-server"));
    let id = first.memory();
    for (method, path) in
        [("GET", ""), ("GET", "/file"), ("POST", "/text"), ("POST", "/ask"), ("POST", "/end"), ("PUT", "/file"), ("DELETE", "")]
    {
        let path = format!("/v1/memories/{id}{path}");
        assert_eq!(second.call(method, &path, &[], b"{\"question\": \"?\"}").status, 404, "{method} {path}");
        for client in [server.client(), server.client_with("another-key-of-this-server")] {
            assert_eq!(client.call(method, &path, &[], b"").status, 401, "{method} {path}");
        }
    }
    assert!(second.get("/v1/memories").json()["data"].as_array().unwrap().is_empty());
    assert_eq!(second.post("/v1/memories", &json!({ "from": id })).status, 404);
    assert_eq!(second.post("/v1/completions", &json!({ "prompt": "a", "memory": id })).status, 404);
    let unknown = server.client().get("/metrics");
    assert_eq!((unknown.status, unknown.header("www-authenticate")), (401, Some("Bearer")));
    assert_eq!((server.client().get("/health").status, server.client().get("/").status), (200, 200));

    let foreign = |headers: &[(&str, &str)]| first.call("GET", "/v1/memories", headers, b"").status;
    assert_eq!(foreign(&[("Host", "evil.example:80")]), 403, "a name that somebody points here");
    assert_eq!(foreign(&[("Origin", "http://evil.example")]), 403, "a page of another place");
    let own = format!("http://{}", server.address);
    assert_eq!(foreign(&[("Origin", &own)]), 200);
}

#[test]
fn a_memory_that_grows_with_its_text_is_moved_too() {
    let mut config = session().model().config().clone();
    (config.memory, config.segment_size) = (MemoryConfig::new(RmtR { tokens: 2 }), 16);
    let model = Model::fresh(config, 3, DType::F32, &Device::cpu()).unwrap();
    let empty = Session::new(model, session().tokenizer().clone()).unwrap();
    let server = Running::start(Settings::new("growing", empty.fork()));
    let client = server.client();
    let (id, moved, text) = (client.memory(), client.memory(), book(1, 2_000));
    client.add(&id, text.as_bytes());
    let mut alone = empty;
    alone.read_from("the text", Cursor::new(text.into_bytes())).unwrap();
    let file = client.file(&id);
    assert_eq!(file, alone.to_bytes().unwrap());
    let put = format!("/v1/memories/{moved}/file");
    assert_eq!(client.call("PUT", &put, &[], &file).status, 200);
    assert_eq!(client.ask(&moved, "Where is John?")["answer"], client.ask(&id, "Where is John?")["answer"]);
    // Its size says nothing: more than the model's other memories may have is looked at.
    assert_eq!(client.call("PUT", &put, &[], &vec![0; 20_000_000]).status, 400);
    assert_eq!(client.file(&moved), file);
}

#[test]
fn who_deletes_a_memory_ends_the_text_that_is_on_its_way_into_it() {
    let server = Running::start(settings());
    let client = server.client();
    let id = client.memory();
    let mut stream = client.connect();
    stream.write_all(&client.request("POST", &format!("/v1/memories/{id}/text"), &[], Some(1_000_000))).unwrap();
    stream.write_all(book(0, 3_000).as_bytes()).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(client.call("DELETE", &format!("/v1/memories/{id}"), &[], b"").status, 204);
    assert_eq!(read_reply(&mut stream).status, 404, "though it has sent nothing more");
    assert!(client.get("/metrics").text().contains("armt_texts_on_their_way 0\n"));
}

#[test]
fn what_is_too_much_or_damaged_is_refused_and_changes_nothing() {
    let mut settings = settings();
    (settings.limits.memories, settings.limits.body, settings.limits.answer) = (2, 10_000, 100);
    settings.limits.silence = Duration::from_millis(300);
    let server = Running::start(settings);
    let client = server.client();
    let id = client.memory();
    client.memory();
    let many = client.call("POST", "/v1/memories", &[], b"");
    assert_eq!((many.status, many.header("retry-after")), (429, Some("1")));
    client.add(&id, book(0, 3_000).as_bytes());
    let good = client.file(&id);

    let ask = format!("/v1/memories/{id}/ask");
    for (path, body, status, word) in [
        (ask.as_str(), "{", 400, "EOF"),
        (&ask, "{}", 400, "question"),
        (&ask, r#"{"question": ""}"#, 400, "question"),
        (&ask, r#"{"question": "?", "max_tokens": 101}"#, 400, "100"),
        (&ask, r#"{"question": "?", "temperature": -1}"#, 400, "temperature"),
        (&ask, r#"{"question": "?", "max_token": 1}"#, 400, "max_token"),
        (&format!("/v1/memories/{id}/text?ofset=1"), "a", 400, "ofset"),
        ("/health", "", 405, "method"),
        ("/v1/completions", r#"{"prompt": []}"#, 400, "prompt"),
        ("/v1/completions", r#"{"prompt": [1000000]}"#, 400, "vocabulary"),
        ("/v1/completions", r#"{"prompt": "a", "n": 2}"#, 400, "1"),
        ("/v1/memories", r#"{"form": "x"}"#, 400, "form"),
        ("/v1/memories", r#"{"from": "../../etc/passwd"}"#, 404, "memory"),
    ] {
        let said = client.call("POST", path, &[], body.as_bytes());
        assert_eq!(said.status, status, "{path} {body}: {}", said.text());
        assert!(said.json()["error"].to_string().contains(word), "{path} {body}: {}", said.text());
    }
    assert_eq!(client.call("POST", &ask, &[], &[b' '; 10_001]).status, 413);

    let put = format!("/v1/memories/{id}/file");
    for at in [0, 40, good.len() / 2, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        assert_eq!(client.call("PUT", &put, &[], &bad).status, 400, "byte {at}");
        assert_eq!(client.call("PUT", &put, &[], &good[..at]).status, 400, "cut at {at}");
    }
    assert_eq!(client.call("PUT", &put, &[("Content-Length", "99999999999")], b"").status, 413);
    assert_eq!(client.call("PUT", &put, &[("Content-Length", "20000000")], &[0; 100]).status, 413, "this memory has its size");
    let mut stream = client.connect();
    stream.write_all(&client.request("PUT", &put, &[("Transfer-Encoding", "chunked")], None)).unwrap();
    assert_eq!(read_reply(&mut stream).status, 411);
    // A body that stays silent.
    let mut stream = client.connect();
    stream.write_all(&client.request("POST", &format!("/v1/memories/{id}/text"), &[], Some(10))).unwrap();
    assert_eq!(read_reply(&mut stream).status, 408);
    assert_eq!(client.file(&id), good);
    client.add(&id, b" More.");
}

#[tokio::test]
async fn an_address_that_others_reach_needs_keys() {
    let refused = Server::bind("0.0.0.0", 0, settings()).await.err().unwrap();
    assert!(refused.to_string().contains("keys"), "{refused}");
}

#[test]
fn memories_that_are_kept_are_there_again() {
    let keep = tempfile::tempdir().unwrap();
    let start = || {
        let mut settings = settings();
        settings.keep = Some(keep.path().into());
        Running::start(settings)
    };
    let server = start();
    let client = server.client();
    let (one, two) = (client.memory(), client.memory());
    client.add(&one, book(2, 3_000).as_bytes());
    let files = [client.file(&one), client.file(&two)];
    let gone = client.memory();
    client.call("DELETE", &format!("/v1/memories/{gone}"), &[], b"");
    drop(server);
    std::fs::write(keep.path().join("mem_0.memory"), "no memory at all, but long enough to look at").unwrap();
    let server = start();
    let client = server.client();
    assert_eq!([client.file(&one), client.file(&two)], files);
    assert_eq!(client.get("/v1/memories").json()["data"].as_array().unwrap().len(), 2);
    assert!(keep.path().join("mem_0.memory").exists(), "what cannot be read is left alone");
    client.add(&one, b" And on.");
}

#[test]
fn a_memory_that_nobody_uses_goes_when_its_time_is_over() {
    let server = Running::start(settings());
    let client = server.client();
    let said = client.post("/v1/memories", &json!({ "ttl": 1 })).json();
    let id = said["id"].as_str().unwrap();
    let stays = client.memory();
    std::thread::sleep(Duration::from_millis(3_500));
    assert_eq!(client.get(&format!("/v1/memories/{id}")).status, 404);
    assert_eq!(client.get(&format!("/v1/memories/{stays}")).status, 200);

    // A text on its way into it is a use of it, to its end.
    let said = client.post("/v1/memories", &json!({ "ttl": 1 })).json();
    let path = format!("/v1/memories/{}", said["id"].as_str().unwrap());
    let mut stream = client.connect();
    stream.write_all(&client.request("POST", &format!("{path}/text"), &[], Some(10))).unwrap();
    stream.write_all(b"Mary ").unwrap();
    std::thread::sleep(Duration::from_millis(2_500));
    stream.write_all(b"went.").unwrap();
    assert_eq!(read_reply(&mut stream).status, 200);
    assert_eq!(client.get(&path).status, 200);
}

#[test]
fn what_is_told_of_tokens_agrees_with_their_text() {
    let mut settings = settings();
    settings.limits.answer = 10;
    let server = Running::start(settings);
    let client = server.client();
    let said = client.post("/v1/completions", &json!({ "prompt": "Where is Mary?GEN", "temperature": 0 }));
    assert_eq!(said.status, 200, "no more than is allowed where nobody asks for more: {}", said.text());
    // A tokenizer that knows all bytes.
    let books = support::folder().with_file_name("books");
    let books = armt::Session::open_on(books, armt::engine::DType::F32, &armt::engine::Device::cpu()).unwrap();
    let books = Running::start(Settings::new("books", books));
    let (client, text) = (books.client(), "naïve — 日本語<|endoftext|> went and so");
    let tokens = client.post("/tokenize", &json!({ "prompt": text })).json()["tokens"].clone();
    for prompt in [json!(text), tokens] {
        let asked = json!({ "prompt": prompt, "echo": true, "logprobs": 3, "temperature": 5, "seed": -1, "max_tokens": 6 });
        let choice = client.post("/v1/completions", &asked).json()["choices"][0].clone();
        let whole: Vec<char> = choice["text"].as_str().unwrap().chars().collect();
        assert!(choice["text"].as_str().unwrap().starts_with(text), "{choice}");
        let told = &choice["logprobs"];
        let list = |name: &str| told[name].as_array().unwrap().clone();
        let mut plain = 0;
        for (i, token) in list("tokens").iter().enumerate() {
            let (token, at) = (token.as_str().unwrap(), told["text_offset"][i].as_u64().unwrap() as usize);
            let there: String = whole[at..whole.len().min(at + token.chars().count())].iter().collect();
            plain += usize::from(there == token);
            let (own, top) = (&told["token_logprobs"][i], &told["top_logprobs"][i]);
            assert!(i == 0 || &top[token] == own && (3..=4).contains(&top.as_object().unwrap().len()), "{token}: {own}, {top}");
        }
        // All but parts of characters, and an end that is not said.
        assert!(plain >= list("tokens").len() / 2 && list("tokens").iter().any(|token| token == " went"), "{told}");
        let went = list("tokens").iter().position(|token| token == " went").unwrap();
        let at = told["text_offset"][went].as_u64().unwrap() as usize;
        assert_eq!(whole[at..at + 5].iter().collect::<String>(), " went", "{told}");
    }

    // Open tokens are counted when they are certain, and each once.
    let client = server.client();
    let id = client.memory();
    let done = client.add(&id, b"Mary went to the garden. And so on.");
    client.call("POST", &format!("/v1/memories/{id}/end"), &[], b"");
    let counted = format!("armt_tokens_read_total {}\n", done["tokens"]);
    assert!(client.get("/metrics").text().contains(&counted), "{counted}");
}
