//! A load for a server: clients that read books into memories of their own and others that ask, for some seconds, and what came of it.
//!
//! ```sh
//! armt serve models/babilong-qa1 --port 8642 &
//! cargo run --release -p armt-serve --example load -- 127.0.0.1:8642 book.txt --clients 64 --seconds 20
//! ```
//!
//! Prints tokens a second of all clients together, and how long questions took: alone, before anybody reads, and while all read.
//! A client sends `--piece` KiB at a time, 64 if not given: on a GPU 1024, or the clients keep it waiting.
//! `--requests N` asks N questions instead, one after the other on one connection each, and ends.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Alone and beside readings, so that both find the machine as they would.
const BETWEEN_QUESTIONS: Duration = Duration::from_millis(100);

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// One connection that stays open.
struct Connection {
    stream: BufReader<TcpStream>,
    address: String,
}

impl Connection {
    fn open(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream: BufReader::new(stream), address: address.into() })
    }

    fn call(&mut self, method: &str, path: &str, body: &[u8]) -> Result<serde_json::Value> {
        let reply = self.reply(method, path, body)?;
        Ok(if reply.is_empty() { serde_json::Value::Null } else { serde_json::from_slice(&reply)? })
    }

    fn reply(&mut self, method: &str, path: &str, body: &[u8]) -> Result<Vec<u8>> {
        let head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Length: {}\r\n\r\n", self.address, body.len());
        let stream = self.stream.get_mut();
        stream.write_all(head.as_bytes())?;
        stream.write_all(body)?;
        let (mut line, mut length) = (String::new(), 0);
        self.stream.read_line(&mut line)?;
        let status = line.split(' ').nth(1).unwrap_or_default().to_string();
        loop {
            line.clear();
            self.stream.read_line(&mut line)?;
            let Some((key, value)) = line.trim_end().split_once(": ") else { break };
            if key.eq_ignore_ascii_case("content-length") {
                length = value.parse()?;
            }
        }
        let mut reply = vec![0; length];
        self.stream.read_exact(&mut reply)?;
        if !status.starts_with('2') {
            return Err(format!("{method} {path}: {status} {}", String::from_utf8_lossy(&reply)).into());
        }
        Ok(reply)
    }

    /// Tokens that the server has read, by its own count.
    fn tokens(&mut self) -> Result<f64> {
        let text = self.reply("GET", "/metrics", b"")?;
        let text = String::from_utf8(text)?;
        let count = text.lines().find_map(|line| line.strip_prefix("armt_tokens_read_total "));
        Ok(count.ok_or("the server counts no tokens")?.parse()?)
    }

    fn memory(&mut self) -> Result<String> {
        Ok(self.call("POST", "/v1/memories", b"")?["id"].as_str().unwrap_or_default().to_string())
    }

    /// How long a question takes.
    fn ask(&mut self, id: &str) -> Result<Duration> {
        let start = Instant::now();
        self.call("POST", &format!("/v1/memories/{id}/ask"), br#"{"question": "Where is Mary?", "max_tokens": 10}"#)?;
        Ok(start.elapsed())
    }
}

fn median(times: &mut [Duration]) -> f64 {
    times.sort();
    times.get(times.len() / 2).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let option = |name: &str, usual: u64| {
        let given = words.iter().position(|word| word == name).and_then(|at| words.get(at + 1)?.parse().ok());
        given.unwrap_or(usual)
    };
    let [Some(address), Some(book)] = [words.first(), words.get(1)] else {
        return Err("expected the server's address and a text file".into());
    };
    let (clients, seconds, requests) = (option("--clients", 64), option("--seconds", 20), option("--requests", 0));
    let kib = option("--piece", 64) as usize;
    let book = std::fs::read(book)?;
    let mut asking = Connection::open(address)?;
    let id = asking.memory()?;
    asking.call("POST", &format!("/v1/memories/{id}/text"), &book[..book.len().min(100_000)])?;
    if requests > 0 {
        let mut times = (0..requests).map(|_| asking.ask(&id)).collect::<Result<Vec<_>>>()?;
        println!("{requests} questions, {:.2} ms each (median)", median(&mut times));
        return Ok(());
    }
    let mut alone = Vec::new();
    for _ in 0..50 {
        alone.push(asking.ask(&id)?);
        std::thread::sleep(BETWEEN_QUESTIONS);
    }
    let over = AtomicBool::new(false);
    let (mut beside, time) = std::thread::scope(|scope| -> Result<_> {
        let (over, book) = (&over, &book);
        let readers: Vec<_> = (0..clients as usize)
            .map(|client| {
                scope.spawn(move || -> Result<()> {
                    let mut connection = Connection::open(address)?;
                    let id = connection.memory()?;
                    let mut at = client * 7919 % book.len();
                    while !over.load(Ordering::Relaxed) {
                        let piece = &book[at..book.len().min(at + (kib << 10))];
                        connection.call("POST", &format!("/v1/memories/{id}/text"), piece)?;
                        at = (at + piece.len()) % book.len();
                    }
                    connection.call("DELETE", &format!("/v1/memories/{id}"), b"").map(drop)
                })
            })
            .collect();
        // Until all are at it.
        std::thread::sleep(Duration::from_secs(2));
        let (start, before) = (Instant::now(), asking.tokens()?);
        let mut beside = Vec::new();
        while start.elapsed() < Duration::from_secs(seconds) {
            beside.push(asking.ask(&id)?);
            std::thread::sleep(BETWEEN_QUESTIONS);
        }
        let time = start.elapsed();
        let tokens = asking.tokens()? - before;
        println!("{clients} clients read {:.0} tokens/s", tokens / time.as_secs_f64());
        over.store(true, Ordering::Relaxed);
        for reader in readers {
            reader.join().map_err(|_| "a client failed")??;
        }
        Ok((beside, time))
    })?;
    asking.call("DELETE", &format!("/v1/memories/{id}"), b"")?;
    let slowest = beside.iter().max().map_or(f64::NAN, |time| time.as_secs_f64() * 1e3);
    let (n, alone, beside) = (beside.len(), median(&mut alone), median(&mut beside));
    println!(
        "a question takes {alone:.2} ms alone and {beside:.2} ms beside them (medians of 50 and {n} in {:.0} s, slowest {slowest:.1})",
        time.as_secs_f64()
    );
    Ok(())
}
