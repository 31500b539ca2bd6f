//! Clients that go away, come twice, bring what they should not, or never end.

#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use armt::engine::Tensor;
use serde_json::json;
use support::{Client, Running, book, read, read_reply, session, settings};

/// The memory's bytes of text.
fn taken(client: &Client, id: &str) -> u64 {
    client.get(&format!("/v1/memories/{id}")).json()["text_bytes"].as_u64().unwrap()
}

/// Waits until something holds.
fn until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_file_whose_client_has_gone_away_takes_its_place_before_any_text_or_not_at_all() {
    let server = Running::start(settings());
    let client = server.client();
    let other = client.memory();
    // Its end is open, and long: to look at it takes a while.
    client.add(&other, &vec![b'x'; 200_000]);
    let file = client.file(&other);
    for _ in 0..10 {
        let id = client.memory();
        let mut stream = client.connect();
        stream.write_all(&client.request("PUT", &format!("/v1/memories/{id}/file"), &[], Some(file.len()))).unwrap();
        stream.write_all(&file).unwrap();
        drop(stream);
        let said = client.call("POST", &format!("/v1/memories/{id}/text"), &[], b" And Mary went to the garden.");
        if said.status == 200 {
            let after = client.file(&id);
            std::thread::sleep(Duration::from_millis(60));
            assert_eq!(client.file(&id), after, "nothing takes its place any more");
        } else {
            assert_eq!(said.status, 409, "{}", said.text());
        }
    }
}

#[test]
fn a_text_with_a_key_is_read_once_however_often_it_comes() {
    let keep = tempfile::tempdir().unwrap();
    let start = || {
        let mut settings = settings();
        settings.keep = Some(keep.path().into());
        Running::start(settings)
    };
    let server = start();
    let client = server.client();
    let text = book(2, 60_000);
    let id = client.memory();
    let path = format!("/v1/memories/{id}/text");
    let once = [("Idempotency-Key", "chapter-1")];
    // All of it is sent, and its client does not wait for the answer.
    let mut stream = client.connect();
    stream.write_all(&client.request("POST", &path, &once, Some(text.len()))).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    drop(stream);
    until("what was sent is read", || client.call("POST", &path, &once, text.as_bytes()).status == 200);
    assert_eq!(taken(&client, &id), text.len() as u64);
    let first = client.call("POST", &path, &once, text.as_bytes());
    let as_events = client.call("POST", &path, &[once[0], ("Accept", "text/event-stream")], text.as_bytes());
    assert_eq!(as_events.events(), [json!({ "done": first.json() })]);

    // The second breaks off, and comes again as a whole, after a restart too.
    let more = book(5, 20_000);
    let next = [("Idempotency-Key", "chapter-2")];
    let mut stream = client.connect();
    stream.write_all(&client.request("POST", &path, &next, Some(more.len()))).unwrap();
    stream.write_all(&more.as_bytes()[..7_001]).unwrap();
    until("what came of it is read", || taken(&client, &id) == text.len() as u64 + 7_001);
    drop(stream);
    drop(server);
    let server = start();
    let client = server.client();
    assert_eq!(client.call("POST", &path, &once, text.as_bytes()).status, 200, "read before the server was stopped");
    assert_eq!(client.call("POST", &path, &next, more.as_bytes()).status, 200);
    assert_eq!(client.file(&id), read(&format!("{text}{more}")).to_bytes().unwrap());

    // What broke off before other text came cannot go on.
    let mut stream = client.connect();
    let third = [("Idempotency-Key", "chapter-3")];
    stream.write_all(&client.request("POST", &path, &third, Some(100))).unwrap();
    stream.write_all(b"It broke off ").unwrap();
    let broken = (text.len() + more.len() + 13) as u64;
    until("its beginning is read", || taken(&client, &id) == broken);
    drop(stream);
    until("it is over", || client.call("POST", &path, &[], b"and other text came").status == 200);
    assert_eq!(client.call("POST", &path, &third, b"It broke off here.").status, 409);
    for (key, why) in [("schl\u{fc}ssel", "ASCII"), ("", "1 to 255 characters"), (&"k".repeat(256), "1 to 255 characters")] {
        let refused = client.call("POST", &path, &[("Idempotency-Key", key)], b"a");
        assert_eq!((refused.status, refused.text().contains(why)), (400, true), "{}", refused.text());
    }
    assert_eq!(client.call("POST", &path, &[("Content-Encoding", "gzip")], b"a").status, 415);
}

/// What a server has said is in the memory's file before anybody hears it, and is not written again when it ends.
#[test]
fn an_answer_to_a_text_with_a_key_outlives_any_end_of_the_server() {
    let (keep, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let start = |folder: &std::path::Path| {
        let mut settings = settings();
        settings.keep = Some(folder.into());
        Running::start(settings)
    };
    let server = start(keep.path());
    let client = server.client();
    let id = client.memory();
    let (path, once) = (format!("/v1/memories/{id}/text"), [("Idempotency-Key", "chapter-1")]);
    let first = client.call("POST", &path, &once, b"Mary went to the garden. And so on.").json();
    let name = format!("{id}.memory");
    // As a kill now would leave it.
    std::fs::copy(keep.path().join(&name), copy.path().join(&name)).unwrap();
    let again = start(copy.path());
    assert_eq!(again.client().call("POST", &path, &once, b"Mary went to the garden. And so on.").json(), first);
    let written = || std::fs::metadata(keep.path().join(&name)).unwrap().modified().unwrap();
    let before = written();
    drop(server);
    assert_eq!(written(), before);
}

#[test]
fn a_text_that_is_refused_has_not_come() {
    let server = Running::start(settings());
    let client = server.client();
    let id = client.memory();
    let path = format!("/v1/memories/{id}/text");
    let key = [("Idempotency-Key", "chapter-1")];
    let mut stream = client.connect();
    stream.write_all(&client.request("POST", &path, &key, Some(100))).unwrap();
    stream.write_all(b"It broke off ").unwrap();
    until("its beginning is read", || taken(&client, &id) == 13);
    drop(stream);
    until("it is over", || client.get(&format!("/v1/memories/{id}")).json()["reading"] == false);
    assert_eq!(client.call("POST", &format!("{path}?offset=5000"), &[], b"Other text.").status, 409);
    let said = client.call("POST", &path, &key, b"It broke off here.");
    assert_eq!((said.status, taken(&client, &id)), (200, 18), "{}", said.text());
}

#[test]
fn numbers_that_no_file_could_hold_are_refused_and_the_memory_stays() {
    let keep = tempfile::tempdir().unwrap();
    let mut settings = settings();
    settings.keep = Some(keep.path().into());
    let server = Running::start(settings);
    let client = server.client();
    let id = client.memory();
    client.add(&id, book(0, 6_000).as_bytes());
    // A file whose numbers are finite, and no longer when they are added to.
    let mut wild = session();
    wild.from_bytes(&client.file(&id)).unwrap();
    let parts = wild.state().tensors().map(|(_, part)| Tensor::full(3e38, part.dims(), part.device()).unwrap());
    let layout = wild.model().recurrence().layout();
    let large = layout.state(parts.collect(), wild.state().counts().to_vec()).unwrap();
    wild.set_state(large).unwrap();
    let put = format!("/v1/memories/{id}/file");
    assert_eq!(client.call("PUT", &put, &[], &wild.to_bytes().unwrap()).status, 200);
    let before = client.file(&id);
    let said = client.call("POST", &format!("/v1/memories/{id}/text"), &[], book(1, 9_000).as_bytes());
    assert_eq!(said.status, 400, "{}", said.text());
    assert_eq!(client.file(&id), before);
    let start = Instant::now();
    let other = client.memory();
    client.add(&other, b"Others are kept meanwhile.");
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_folder_that_cannot_be_written_is_heard_of_at_once_and_tried_again() {
    let keep = tempfile::tempdir().unwrap();
    let folder = keep.path().join("memories");
    let mut settings = settings();
    settings.keep = Some(folder.clone());
    let server = Running::start(settings);
    let client = server.client();
    let id = client.memory();
    std::fs::rename(&folder, keep.path().join("away")).unwrap();
    let start = Instant::now();
    let said = client.call("POST", &format!("/v1/memories/{id}/text"), &[], b"Mary went to the garden.");
    assert_eq!((said.status, said.header("retry-after")), (503, Some("1")));
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(client.call("POST", "/v1/memories", &[], b"").status, 503);
    assert_eq!(client.get("/v1/memories").json()["data"].as_array().unwrap().len(), 1, "what was not made takes no place");
    std::fs::rename(keep.path().join("away"), &folder).unwrap();
    // Nothing can take the place of a folder.
    let place = folder.join(format!("{id}.memory"));
    std::fs::rename(&place, folder.join("aside")).unwrap();
    std::fs::create_dir(&place).unwrap();
    assert_eq!(client.call("POST", &format!("/v1/memories/{id}/text"), &[], b"And so on.").status, 503);
    // It is tried again and again.
    let is_part = |path: &std::path::Path| path.extension().is_some_and(|ending| ending == "new");
    until("what could not be written takes no room", || {
        !std::fs::read_dir(&folder).unwrap().any(|entry| is_part(&entry.unwrap().path()))
    });
    std::fs::remove_dir(&place).unwrap();
    std::fs::rename(folder.join("aside"), &place).unwrap();
    let file = folder.join(format!("{id}.memory"));
    let before = std::fs::metadata(&file).unwrap().modified().unwrap();
    until("it is written after all", || std::fs::metadata(&file).unwrap().modified().unwrap() != before);
}

#[test]
fn who_deletes_a_memory_that_is_being_kept_keeps_nobody_waiting() {
    let keep = tempfile::tempdir().unwrap();
    let mut settings = settings();
    settings.keep = Some(keep.path().into());
    let server = Running::start(settings);
    let start = Instant::now();
    let threads: Vec<_> = (0..24)
        .map(|n| {
            let client = server.client();
            std::thread::spawn(move || {
                let id = client.memory();
                let adds = client.clone();
                let path = format!("/v1/memories/{id}/text");
                let adding = std::thread::spawn(move || adds.call("POST", &path, &[], book(n, 3_000).as_bytes()).status);
                std::thread::sleep(Duration::from_millis(n as u64 % 8));
                client.call("DELETE", &format!("/v1/memories/{id}"), &[], b"");
                adding.join().unwrap()
            })
        })
        .collect();
    for thread in threads {
        let status = thread.join().unwrap();
        assert!([200, 404].contains(&status), "{status}");
    }
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    assert!(std::fs::read_dir(keep.path()).unwrap().all(|entry| entry.unwrap().file_name() == ".lock"));
}

#[test]
fn a_connection_that_says_nothing_is_closed_and_others_get_its_place() {
    let mut settings = settings();
    settings.limits.silence = Duration::from_millis(400);
    settings.limits.connections = 4;
    let server = Running::start(settings);
    let client = server.client();
    let mut silent: Vec<_> = (0..4).map(|_| client.connect()).collect();
    silent[0].write_all(b"GET /health HT").unwrap();
    let start = Instant::now();
    assert_eq!(client.get("/health").status, 200);
    assert!(start.elapsed() < Duration::from_secs(10));
    // Closed, with or without a word about it.
    assert!(silent[0].read_to_end(&mut Vec::new()).is_ok());
}

#[test]
fn a_server_ends_in_its_time_whatever_its_clients_do() {
    let mut settings = settings();
    settings.limits.ending = Duration::from_secs(3);
    let server = Running::start(settings);
    let client = server.client();
    let id = client.memory();
    let mut stream = client.connect();
    stream
        .write_all(&client.request("POST", &format!("/v1/memories/{id}/text"), &[("Transfer-Encoding", "chunked")], None))
        .unwrap();
    let endless = std::thread::spawn(move || while stream.write_all(b"a\r\n0123456789\r\n").is_ok() {});
    std::thread::sleep(Duration::from_millis(300));
    let start = Instant::now();
    drop(server);
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
    endless.join().unwrap();
}

#[test]
fn work_that_nobody_waits_for_ends() {
    let server = Running::start(settings());
    let client = server.client();
    // Several times as much as is read before it is looked who has gone.
    let body = json!({ "prompt": vec![1; 500_000], "max_tokens": 1, "seed": 1 }).to_string();
    let ask = || {
        let start = Instant::now();
        assert_eq!(client.call("POST", "/v1/completions", &[], body.as_bytes()).status, 200);
        start.elapsed()
    };
    let alone = ask();
    let streamed = body.replace("\"seed\"", "\"stream\":true,\"seed\"");
    for body in [&body, &streamed] {
        for _ in 0..16 {
            let mut stream = client.connect();
            stream.write_all(&client.request("POST", "/v1/completions", &[], Some(body.len()))).unwrap();
            stream.write_all(body.as_bytes()).unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
        let after = ask();
        // All of them would take at least eight times as long on two cores.
        assert!(after < 4 * alone + Duration::from_millis(200), "{after:?} beside {alone:?}");
    }
}

#[test]
fn a_body_has_room_for_its_bytes_until_it_is_answered() {
    let mut settings = settings();
    settings.limits.bodies = 0;
    let server = Running::start(settings);
    let client = server.client();
    // There is room for two of the largest files, of somewhat more than 16 MiB each. Pieces of one byte take no more of it than others.
    let asked = " ".repeat(40_000) + r#"{"prompt": "a"}"#;
    let pieces: String = asked.chars().map(|one| format!("1\r\n{one}\r\n")).collect();
    let said = client.call("POST", "/tokenize", &[("Transfer-Encoding", "chunked")], (pieces + "0\r\n\r\n").as_bytes());
    assert_eq!(said.status, 200, "{}", said.text());

    let mut settings = support::settings();
    (settings.limits.bodies, settings.limits.body) = (0, 16 << 20);
    let server = Running::start(settings);
    let client = server.client();
    // What takes long to read has come as a whole, and is tokens by now.
    let long = format!(r#"{{"prompt": [{}1], "max_tokens": 1}}"#, "1,".repeat(6 << 20));
    let mut reading: Vec<_> = (0..2).map(|_| client.connect()).collect();
    for stream in &mut reading {
        stream.write_all(&client.request("POST", "/v1/completions", &[], Some(long.len()))).unwrap();
        stream.write_all(long.as_bytes()).unwrap();
    }
    std::thread::sleep(Duration::from_secs(3));
    let large = " ".repeat(12 << 20) + r#"{"prompt": "a"}"#;
    let status = || client.call("POST", "/tokenize", &[], large.as_bytes()).status;
    assert_eq!(status(), 503);
    drop(reading);
    until("there is room again", || status() == 200);
}

#[test]
fn a_client_that_takes_nothing_of_its_answers_is_not_waited_for() {
    let mut settings = settings();
    settings.limits.silence = Duration::from_millis(400);
    settings.limits.connections = 2;
    let server = Running::start(settings);
    let client = server.client();
    // Answers of more bytes than a connection holds by itself.
    let many = format!("GET /openapi.json HTTP/1.1\r\nHost: {}\r\n\r\n", client.address).repeat(600);
    let deaf: Vec<_> = (0..2).map(|_| client.connect()).collect();
    deaf.iter().for_each(|mut stream| stream.write_all(many.as_bytes()).unwrap());
    let mut other = client.connect();
    other.set_read_timeout(Some(Duration::from_secs(15))).unwrap();
    other.write_all(&client.request("GET", "/health", &[], Some(0))).unwrap();
    assert_eq!(read_reply(&mut other).status, 200);
}

#[test]
fn a_word_that_is_open_is_counted_when_its_text_is_over() {
    let server = Running::start(settings());
    let client = server.client();
    let word = "x".repeat(200_000);
    let path = format!("/v1/memories/{}/text", client.memory());
    let events = client.call("POST", &path, &[("Accept", "text/event-stream")], word.as_bytes()).events();
    // A long one takes a while to count: after each share all others would wait for it.
    let (last, progress) = events.split_last().unwrap();
    assert!(!progress.is_empty() && progress.iter().all(|event| event["progress"]["tokens_read"] == 0), "{progress:?}");
    assert_eq!(last["done"]["tokens_read"], read(&word).tokens_read().unwrap());
}

#[test]
fn completions_say_why_they_end_and_refuse_what_is_not_done() {
    let server = Running::start(settings());
    let client = server.client();
    let prompt = "Mary went to the kitchen. Where is Mary?GEN";
    let ask = |more: serde_json::Value| {
        let mut body = json!({ "prompt": prompt, "temperature": 0 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        client.post("/v1/completions", &body)
    };
    let whole = ask(json!({ "max_tokens": 8 })).json();
    let said = whole["usage"]["completion_tokens"].as_u64().unwrap();
    for logprobs in [json!(null), json!(1)] {
        // As many tokens as it may have, of which the last ends it.
        let reason = |n: u64| {
            ask(json!({ "max_tokens": n, "logprobs": logprobs, "echo": null })).json()["choices"][0]["finish_reason"].clone()
        };
        assert_eq!((reason(said), reason(said - 1)), (json!("stop"), json!("length")));
        let stopped = ask(json!({ "max_tokens": said - 1, "logprobs": logprobs, "stop": "chen" })).json();
        assert_eq!(stopped["choices"][0]["finish_reason"], "stop", "{stopped}");
    }
    let events = ask(json!({ "max_tokens": 8, "stream": true, "stream_options": { "include_usage": true } })).events();
    assert_eq!(events[events.len() - 2]["usage"]["completion_tokens"], said);

    for (body, status, word) in [
        (json!({ "prompt": prompt, "top_p": 2, "stream": true }), 400, "top_p"),
        (json!({ "prompt": prompt, "top_k": 0 }), 400, "top_k"),
        (json!({ "prompt": { "text": prompt } }), 400, "a list of tokens"),
        (json!({ "prompt": prompt, "frequency_penalty": 0.5 }), 400, "frequency_penalty"),
        (json!({ "prompt": prompt, "logit_bias": { "5": 1 } }), 400, "logit_bias"),
        (json!({ "prompt": vec![1; 60_000], "echo": true, "logprobs": 20 }), 413, "49932"),
        (json!([prompt]), 400, "object"),
    ] {
        let said = client.post("/v1/completions", &body);
        assert!(said.status == status && said.text().contains(word), "{word}: {} {}", said.status, said.text());
    }
    assert_eq!(client.post("/v1/memories", &json!(["x", 5, null])).status, 400);
    for path in ["/v1/memories/%ff", "/v1/memories/%ff/ask", "/v1/models/another"] {
        let said = client.get(path);
        assert!([404, 405].contains(&said.status) && said.json()["error"]["message"].is_string(), "{path}");
    }
    assert_eq!(client.get("/v1/models/babilong-qa1").json()["id"], "babilong-qa1");
    assert_eq!(client.get("/tokenizer_info").json()["eos_token"], "<|endoftext|>");
    assert!(client.get("/metrics").text().contains("armt_answers_total 8\n"));
}

#[test]
fn a_folder_of_memories_is_private_and_holds_nothing_half_written() {
    let keep = tempfile::tempdir().unwrap();
    let folder = keep.path().join("memories");
    let start = || {
        let mut settings = settings();
        settings.keep = Some(folder.clone());
        settings.limits.disk = 400_000;
        Running::start(settings)
    };
    let server = start();
    let id = server.client().memory();
    drop(server);
    #[cfg(unix)]
    for (path, mode) in [(folder.clone(), 0o700), (folder.join(format!("{id}.memory")), 0o600)] {
        let permissions = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(path).unwrap().permissions());
        assert_eq!(permissions & 0o777, mode);
    }
    std::fs::write(folder.join("mem_1.new"), vec![0; 500_000]).unwrap();
    let server = start();
    assert!(!folder.join("mem_1.new").exists());
    server.client().add(&id, b"There is room.");
}
