//! A server of the shipped model on a free port, and a client that speaks HTTP as it comes off the wire.

#![allow(dead_code, clippy::unwrap_used)] // each test binary uses its part

use std::io::{BufRead, BufReader, Cursor, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use armt::Session;
use armt::engine::{DType, Device};
use armt_serve::{Server, Settings};
use serde_json::Value;
use tokio::sync::oneshot;

pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/babilong-qa1")
}

/// A session of the shipped model that has read nothing.
pub fn session() -> Session {
    static SESSION: LazyLock<Session> = LazyLock::new(|| Session::open_on(folder(), DType::F32, &Device::cpu()).unwrap());
    SESSION.fork()
}

pub fn read(text: &str) -> Session {
    let mut session = session();
    session.read_from("the text", Cursor::new(text.as_bytes().to_vec())).unwrap();
    session
}

pub fn settings() -> Settings {
    Settings::new("babilong-qa1", session())
}

/// A book with facts in it, of about so many bytes.
pub fn book(seed: usize, bytes: usize) -> String {
    let words =
        ["the", "old", "house", "stood", "quite", "alone", "over", "sea—", "winter", "naïve", "“so", "it”", "1847,", "went"];
    let mut text = String::new();
    let mut state = seed as u64 + 1;
    while text.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push_str(words[(state >> 33) as usize % words.len()]);
        text.push(if state >> 60 == 0 { '\n' } else { ' ' });
    }
    let (who, room) = (["Mary", "John", "Sandra", "Daniel"][seed % 4], ["kitchen", "garden", "office", "hallway"][seed / 4 % 4]);
    format!("{text}{who} went to the {room}. {text}")
}

/// A running server, which ends when it is dropped.
pub struct Running {
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Running {
    pub fn start(settings: Settings) -> Self {
        let (told, address) = std::sync::mpsc::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(async {
                let server = Server::bind("127.0.0.1", 0, settings).await.unwrap();
                told.send(server.address()).unwrap();
                server.run(async { drop(stopped.await) }).await.unwrap();
            });
        });
        Running { address: address.recv().unwrap(), stop: Some(stop), thread: Some(thread) }
    }

    pub fn client(&self) -> Client {
        Client { address: self.address, key: None }
    }

    pub fn client_with(&self, key: &str) -> Client {
        Client { key: Some(key.into()), ..self.client() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.take().map(|stop| stop.send(()));
        self.thread.take().map(|thread| thread.join());
    }
}

#[derive(Clone)]
pub struct Client {
    pub address: SocketAddr,
    pub key: Option<String>,
}

pub struct Said {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Said {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    /// The JSON of each event of a stream; the sign of the end is null.
    pub fn events(&self) -> Vec<Value> {
        let text = self.text();
        let lines = text.lines().filter_map(|line| line.strip_prefix("data: "));
        lines.map(|line| if line == "[DONE]" { Value::Null } else { serde_json::from_str(line).unwrap() }).collect()
    }
}

impl Client {
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        stream
    }

    /// One request on a connection of its own. Headers of the caller replace the usual ones.
    pub fn call(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Said {
        let mut stream = self.connect();
        stream.write_all(&self.request(method, path, headers, Some(body.len()))).unwrap();
        // A server that refuses at once may not hear the end.
        let _ = stream.write_all(body);
        read_reply(&mut stream)
    }

    pub fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], length: Option<usize>) -> Vec<u8> {
        let mut text = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
        let given = |name: &str| headers.iter().any(|(key, _)| key.eq_ignore_ascii_case(name));
        if !given("host") {
            text += &format!("Host: {}\r\n", self.address);
        }
        if let Some(key) = self.key.as_ref().filter(|_| !given("authorization")) {
            text += &format!("Authorization: Bearer {key}\r\n");
        }
        if let Some(length) = length.filter(|_| !given("content-length")) {
            text += &format!("Content-Length: {length}\r\n");
        }
        headers.iter().for_each(|(key, value)| text += &format!("{key}: {value}\r\n"));
        (text + "\r\n").into_bytes()
    }

    pub fn get(&self, path: &str) -> Said {
        self.call("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Said {
        self.call("POST", path, &[], body.to_string().as_bytes())
    }

    /// A new memory's id.
    pub fn memory(&self) -> String {
        let said = self.call("POST", "/v1/memories", &[], b"");
        assert_eq!(said.status, 201, "{}", said.text());
        said.json()["id"].as_str().unwrap().to_string()
    }

    pub fn add(&self, id: &str, text: &[u8]) -> Value {
        let said = self.call("POST", &format!("/v1/memories/{id}/text"), &[], text);
        assert_eq!(said.status, 200, "{}", said.text());
        said.json()
    }

    pub fn ask(&self, id: &str, question: &str) -> Value {
        let said = self.post(&format!("/v1/memories/{id}/ask"), &serde_json::json!({ "question": question }));
        assert_eq!(said.status, 200, "{}", said.text());
        said.json()
    }

    pub fn file(&self, id: &str) -> Vec<u8> {
        let said = self.get(&format!("/v1/memories/{id}/file"));
        assert_eq!(said.status, 200, "{}", said.text());
        said.body
    }
}

pub fn read_reply(stream: &mut TcpStream) -> Said {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("{line:?}")).parse().unwrap();
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let Some((key, value)) = line.trim_end().split_once(": ") else { break };
        headers.push((key.to_string(), value.to_string()));
    }
    let mut body = Vec::new();
    let mut said = Said { status, headers, body: Vec::new() };
    if said.header("transfer-encoding").is_some_and(|t| t == "chunked") {
        loop {
            let mut size = String::new();
            reader.read_line(&mut size).unwrap();
            let size = usize::from_str_radix(size.trim(), 16).unwrap();
            let mut piece = vec![0; size + 2];
            reader.read_exact(&mut piece).unwrap();
            body.extend_from_slice(&piece[..size]);
            if size == 0 {
                break;
            }
        }
    } else {
        let _ = reader.read_to_end(&mut body);
    }
    said.body = body;
    said
}
