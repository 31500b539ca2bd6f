//! `armt serve` as it is started, ended and killed.

#![cfg(unix)]
#![allow(clippy::unwrap_used)]

#[path = "../../armt-serve/tests/support/mod.rs"]
mod http;
mod support;

use std::io::{BufRead, BufReader, Cursor};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use armt::Session;
use armt::engine::{DType, Device};
use http::Client;
use support::{Place, text};

/// A server as a process.
struct Process {
    child: Child,
    client: Client,
}

impl Process {
    fn start(place: &Place, more: &str) -> Self {
        let log = std::fs::File::create(place.path("log")).unwrap();
        let mut command = place.command(&format!("serve model --port 0 --device cpu {more}"));
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.split("http://").nth(1).and_then(|rest| rest.split(' ').next());
        let address = address.unwrap_or_else(|| panic!("{line:?} {}", text(&std::fs::read(place.path("log")).unwrap())));
        Process { child, client: Client { address: address.parse().unwrap(), key: None } }
    }

    /// Asks it to end, and waits until it has.
    fn terminate(mut self) {
        assert!(Command::new("kill").arg(self.child.id().to_string()).status().unwrap().success());
        assert!(self.child.wait().unwrap().success());
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn place() -> (Place, Session) {
    let place = Place::new().with_model();
    let session = Session::open_on(place.path("model"), DType::F32, &Device::cpu()).unwrap();
    (place, session)
}

const LINE: &str = "the cat sat in the hat, and in 1999 it went over the sea. ";

#[test]
fn a_server_that_is_killed_has_all_that_it_said_it_had() {
    let (place, mut alone) = place();
    let book = LINE.repeat(40_000);
    let server = Process::start(&place, "--keep kept");
    let id = server.client.memory();
    server.kill();
    let (mut known, mut read) = (0, 0);
    for i in 0..50_u64 {
        let server = Process::start(&place, "--keep kept");
        let told = server.client.get(&format!("/v1/memories/{id}")).json();
        let has = told["text_bytes"].as_u64().unwrap() as usize;
        assert!(has >= known, "kill {i}: it had said {known} bytes and has {has}");
        // What it has is what reading just that would leave, to the bit.
        if has > read {
            alone.read_from("the text", Cursor::new(book.as_bytes()[read..has].to_vec())).unwrap();
            read = has;
        }
        assert_eq!(server.client.file(&id), alone.to_bytes().unwrap(), "kill {i} at {has} bytes");
        known = has;
        let (client, path) = (server.client.clone(), format!("/v1/memories/{id}/text"));
        let end = Instant::now() + Duration::from_millis(i * 37 % 120);
        let book = book.clone();
        let adding = std::thread::spawn(move || {
            let mut said = has;
            while said < book.len() {
                let to = book.len().min(said + 3_001);
                let piece = book.as_bytes()[said..to].to_vec();
                let (client, path) = (client.clone(), format!("{path}?offset={said}"));
                // A server that is killed answers nothing.
                let Ok(answer) = std::panic::catch_unwind(move || client.call("POST", &path, &[], &piece)) else { break };
                let Ok(answer) = serde_json::from_slice::<serde_json::Value>(&answer.body) else { break };
                said = answer["text_bytes"].as_u64().map_or(said, |n| n as usize);
            }
            said
        });
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
        server.kill();
        known = known.max(adding.join().unwrap());
    }
    assert!(known > 0, "nothing was ever read");
}

#[test]
fn a_server_that_is_asked_to_end_finishes_and_has_its_memories_again() {
    let (place, mut alone) = place();
    let server = Process::start(&place, "--keep kept");
    let id = server.client.memory();
    let book = LINE.repeat(20_000);
    let (client, own, words) = (server.client.clone(), id.clone(), book.clone());
    let adding = std::thread::spawn(move || client.add(&own, words.as_bytes()));
    std::thread::sleep(Duration::from_millis(60));
    server.terminate();
    assert_eq!(adding.join().unwrap()["text_bytes"], book.len(), "what runs is finished");
    let server = Process::start(&place, "--keep kept");
    alone.read_from("the text", Cursor::new(book.into_bytes())).unwrap();
    assert_eq!(server.client.file(&id), alone.to_bytes().unwrap());
    server.terminate();
    let log = text(&std::fs::read(place.path("log")).unwrap());
    assert!(log.contains("kept from before: 1") && !log.contains("cat") && !log.contains("mem_"), "{log}");
}

#[test]
fn what_cannot_be_served_is_refused_by_name() {
    let (place, _) = place();
    assert!(place.bad("serve model --host 0.0.0.0 --device cpu").contains("--api-key-file"));
    std::fs::write(place.path("keys"), "short\n").unwrap();
    assert!(place.bad("serve model --api-key-file keys --device cpu").contains("16 characters"));
    assert!(place.bad("serve model --api-key-file none --device cpu").contains("none"));
    assert!(place.bad("serve nowhere --device cpu").contains("nowhere"));
    assert!(place.bad("serve model --keep model/config.json --device cpu").contains("config.json"));
    let server = Process::start(&place, "--keep kept");
    let said = place.bad("serve model --keep kept --port 0 --device cpu");
    assert!(said.contains("kept: another server keeps its memories here"), "{said}");
    let port = server.client.address.port();
    assert!(place.bad(&format!("serve model --port {port} --device cpu")).contains(&format!("--port {port}")));
    server.terminate();
}

/// As a person tries it. Skipped where there is no curl.
#[test]
fn curl_reads_a_book_and_asks_it() {
    let (place, mut alone) = place();
    let curl = |words: &[&str]| Command::new("curl").arg("-sS").args(words).current_dir(place.0.path()).output();
    if curl(&["--version"]).is_err() {
        eprintln!("skipped: curl is not installed");
        return;
    }
    let key = "a-key-for-this-very-test";
    std::fs::write(place.path("keys"), key).unwrap();
    std::fs::write(place.path("book.txt"), LINE.repeat(3_000)).unwrap();
    let server = Process::start(&place, "--api-key-file keys");
    let (at, bearer) = (format!("http://{}/v1/memories", server.client.address), format!("Authorization: Bearer {key}"));
    let call = |words: &[&str]| -> serde_json::Value {
        let out = curl(&[&["-H", bearer.as_str()], words].concat()).unwrap();
        serde_json::from_slice(&out.stdout).unwrap_or_else(|_| panic!("{} {}", text(&out.stdout), text(&out.stderr)))
    };
    let made = call(&["-X", "POST", &at]);
    let id = made["id"].as_str().unwrap();
    let read = call(&["--data-binary", "@book.txt", &format!("{at}/{id}/text")]);
    assert_eq!(read["text_bytes"], LINE.len() * 3_000);
    let answer = call(&["-d", r#"{"question": "the cat", "max_tokens": 5}"#, &format!("{at}/{id}/ask")]);
    alone.read(place.path("book.txt")).unwrap();
    let options = armt::generate::Options { max_new_tokens: 5, ..Default::default() };
    let own = alone.ask_with("the cat", &options, &[], &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
    assert_eq!(answer["answer"], own.text);
    server.terminate();
}
