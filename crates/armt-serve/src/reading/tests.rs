use std::io::Cursor;
use std::path::Path;
use std::sync::LazyLock;

use armt::Model;
use armt::engine::{DType, Device as Machine};

use super::*;
use crate::keys::Client;
use crate::memory::{Made, Now};

/// Segments of a group here.
const SEGMENTS: u64 = 4;

/// A session of a model that reads in much less time than its texts are tokenized in, as a GPU would.
fn session() -> Session {
    static SESSION: LazyLock<Session> = LazyLock::new(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/babilong-qa1");
        let shipped = Session::open_on(folder, DType::F32, &Machine::cpu()).unwrap();
        let mut config = shipped.model().config().clone();
        config.segment_size = 64;
        for (name, size) in [("hidden_size", 8), ("intermediate_size", 8), ("num_attention_heads", 1), ("num_hidden_layers", 1)] {
            config.backbone[name] = size.into();
        }
        Session::new(Model::fresh(config, 1, DType::F32, &Machine::cpu()).unwrap(), shipped.tokenizer().clone()).unwrap()
    });
    SESSION.fork()
}

fn ahead() -> Option<usize> {
    Some(SEGMENTS as usize * session().model().config().segment_size)
}

/// A text of about so many bytes.
fn text(seed: usize, bytes: usize) -> Vec<u8> {
    let words = ["winter ", "naïve ", "“so ", "it” ", "1847, ", "went to the ", "sea—", "quite\n", "Mary ", "don't "];
    made_of(seed, bytes, |draw| words[draw % words.len()].to_string())
}

/// A text whose words have not come before, so that the tokenizer cannot know them.
fn unheard(seed: usize, bytes: usize) -> Vec<u8> {
    let letters = |draw: usize| (0..6).map(move |n| char::from(b'a' + (draw / 26usize.pow(n) % 26) as u8));
    made_of(seed, bytes, |draw| letters(draw).chain([' ']).collect())
}

fn made_of(seed: usize, bytes: usize, word: impl Fn(usize) -> String) -> Vec<u8> {
    let mut text = String::new();
    let mut state = seed as u64 + 1;
    while text.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push_str(&word((state >> 33) as usize));
    }
    text.into_bytes()
}

/// A device that takes its time for each token, in which it needs no core of this machine.
struct Apart {
    reader: SideBySide,
    each: Duration,
    /// Texts of each reading.
    read: Vec<usize>,
}

impl Apart {
    fn new(each: Duration) -> Self {
        Apart { reader: SideBySide::new(&session()).unwrap().in_groups_of(SEGMENTS), each, read: Vec::new() }
    }
}

impl Device for Apart {
    fn read(&mut self, sessions: &mut [Session], texts: Vec<Tokenized>) -> armt::Result<()> {
        let tokens: usize = texts.iter().map(|text| text.tokens.len()).sum();
        self.read.push(texts.len());
        self.reader.read_tokenized(sessions, texts, &mut |_| ControlFlow::Continue(()))?;
        std::thread::sleep(self.each * tokens as u32);
        Ok(())
    }
}

/// Has clients send their texts side by side, each in requests of so many bytes, one after the other. Gives their memories and the time in
/// which the device read, and waited though text had come.
fn serve(ahead: Option<usize>, texts: &[Vec<u8>], request: usize, device: &mut Apart) -> (Vec<Arc<Memory>>, [f64; 2]) {
    let metrics = Arc::new(Metrics::default());
    let readings = Arc::new(Readings::with(&session(), &Limits::default(), None, metrics.clone(), ahead));
    let memory = |_: &Vec<u8>| Memory::new(Made::now(Client::ALL, None, None).unwrap(), Arc::new(session()), 0, Vec::new());
    let memories: Vec<Arc<Memory>> = texts.iter().map(memory).collect();
    std::thread::scope(|scope| {
        for _ in 0..readings.tokenizers() {
            scope.spawn(|| readings.run_tokenizer());
        }
        let reading = scope.spawn(|| readings.run_on(device));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let clients: Vec<_> = memories
            .iter()
            .zip(texts)
            .map(|(memory, text)| {
                let (readings, memory, text) = (readings.clone(), memory.clone(), Bytes::from(text.clone()));
                runtime.spawn(async move {
                    for from in (0..text.len()).step_by(request) {
                        let sending = readings.begin(&memory).unwrap();
                        let body = text.slice(from..text.len().min(from + request));
                        // As bodies come.
                        for at in (0..body.len()).step_by(7_001) {
                            sending.send(body.slice(at..body.len().min(at + 7_001))).await.unwrap();
                        }
                        sending.end();
                        let mut progress = sending.progress();
                        let last = progress.wait_for(|p| p.done || p.failed.is_some()).await.unwrap().clone();
                        assert!(last.failed.is_none(), "{:?}", last.failed);
                    }
                })
            })
            .collect();
        runtime.block_on(async {
            for client in clients {
                client.await.unwrap();
            }
        });
        readings.end();
        reading.join().unwrap();
    });
    let seconds = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed) as f64 / 1e6;
    (memories, [seconds(&metrics.reading), seconds(&metrics.waiting)])
}

#[test]
fn memories_of_texts_that_are_tokenized_ahead_are_those_of_the_library() {
    let texts: Vec<Vec<u8>> = (0..9).map(|seed| text(seed, 900 + 4_000 * (seed * seed % 7))).collect();
    let mut device = Apart::new(Duration::ZERO);
    let (memories, _) = serve(ahead(), &texts, 5_003, &mut device);
    for (memory, text) in memories.iter().zip(&texts) {
        let mut alone = session();
        alone.read_from("the text", Cursor::new(text.clone())).unwrap();
        let Now { session, text_bytes, .. } = memory.now();
        assert_eq!(text_bytes, text.len() as u64);
        assert_eq!(session.to_bytes().unwrap(), alone.to_bytes().unwrap());
    }
}

/// Whatever has to be done to a text before it is read is done while others are read.
#[test]
fn a_device_of_its_own_does_not_wait_while_clients_have_text() {
    let texts: Vec<Vec<u8>> = (0..8).map(|seed| unheard(seed, 100_000)).collect();
    let share = |ahead: Option<usize>| {
        let mut device = Apart::new(Duration::from_micros(3));
        let (_, [reading, waiting]) = serve(ahead, &texts, 50_000, &mut device);
        assert!(ahead.is_none() || device.read.contains(&texts.len()), "they are read side by side: {:?}", device.read);
        waiting / (reading + waiting)
    };
    let (ahead, in_turn) = (share(ahead()), share(None));
    assert!(ahead < 0.1 && 2.0 * ahead < in_turn, "it waits {ahead:.3} of the time, {in_turn:.3} where it tokenizes itself");
}
