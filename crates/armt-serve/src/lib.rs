//! Memories over HTTP: a memory is a resource that is made, added to as text streams in, asked while it grows, forked, downloaded,
//! uploaded and deleted.
//!
//! ```no_run
//! # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
//! use armt_serve::{Server, Settings};
//! let session = armt::Session::open("models/babilong-qa1")?;
//! let server = Server::bind("127.0.0.1", 8642, Settings::new("babilong-qa1", session)).await?;
//! println!("http://{}", server.address());
//! server.run(async { tokio::signal::ctrl_c().await.unwrap_or_default() }).await?;
//! # Ok(())
//! # }
//! ```
//!
//! The rooms, each above those that it may use: `refusal` (what clients hear when something is not done), [`keys`], [`limits`],
//! `metrics`, `memory` (memories and whose they are), `keep` (their files), `reading` and `asking` (what is done with the
//! model, on threads of its own), `template` (conversations), `app` (what requests share), `routes` (HTTP) and `connections`.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod app;
mod asking;
mod connections;
mod keep;
pub mod keys;
pub mod limits;
mod memory;
mod metrics;
mod reading;
mod refusal;
mod routes;
mod template;

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use armt::Session;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::app::App;
use crate::asking::Questions;
use crate::keep::Keeper;
use crate::keys::Keys;
use crate::limits::Limits;
use crate::memory::Memories;
use crate::metrics::Metrics;
use crate::reading::Readings;
pub use crate::routes::ROUTES;
use crate::template::Template;

/// What to serve, and how.
#[non_exhaustive]
pub struct Settings {
    /// What clients call the model.
    pub name: String,
    /// A session that has read nothing.
    pub session: Session,
    /// The model's folder, for its chat template.
    pub folder: Option<PathBuf>,
    /// Who may ask. `None`: everybody who reaches the server, which is then bound to this machine.
    pub keys: Option<Keys>,
    /// Where memories are kept.
    pub keep: Option<PathBuf>,
    /// Names by which clients may call the server, beside its address.
    pub hosts: Vec<String>,
    /// How much of everything is taken.
    pub limits: Limits,
}

impl Settings {
    /// A model for this machine alone, whose memories end with the server.
    pub fn new(name: impl Into<String>, session: Session) -> Self {
        let (folder, keys, keep, hosts) = (None, None, None, Vec::new());
        Settings { name: name.into(), session, folder, keys, keep, hosts, limits: Limits::default() }
    }
}

/// A server that is bound to its address.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    app: Arc<App>,
}

impl Server {
    /// Binds to an address; port 0 takes a free one. Memories that were kept are there again; files that cannot be read are named on the
    /// log and left alone. An address that others can reach is refused without keys.
    pub async fn bind(host: &str, port: u16, settings: Settings) -> std::io::Result<Self> {
        let refused = |what: String| std::io::Error::new(std::io::ErrorKind::InvalidInput, what);
        let named = |e: std::io::Error| std::io::Error::new(e.kind(), format!("--host {host} --port {port}: {e}"));
        let listener = TcpListener::bind((host, port)).await.map_err(named)?;
        let address = listener.local_addr()?;
        if !address.ip().is_loopback() && settings.keys.is_none() {
            return Err(refused(format!("{host} can be reached by others: expected keys, got none")));
        }
        let Settings { name, session, folder, keys, keep, hosts, limits } = settings;
        let chat = folder.as_deref().map(Template::find).transpose()?.flatten();
        let metrics = Arc::new(Metrics::default());
        let (keeper, memories) = (keep.map(|folder| open(folder, limits.disk)).transpose()?, Memories::default());
        if let Some(keeper) = &keeper {
            let known = keeper.load(&session, &mut |path, why| tracing::warn!("{}: not taken: {why}", path.display()))?;
            if known.len() > limits.memories {
                return Err(refused(format!(
                    "{} memories are kept: expected at most {} (`--max-memories`)",
                    known.len(),
                    limits.memories
                )));
            }
            for memory in known {
                memories.add(memory, limits.memories).map_err(|e| refused(e.to_string()))?;
            }
        }
        let largest_file = app::largest_file(&session, &limits);
        let app = App {
            readings: Readings::new(&session, &limits, keeper.clone(), metrics.clone()),
            questions: Questions::new(limits.questions, limits.answering, metrics.clone()),
            hosts: hosts.into_iter().chain([host.to_string()]).collect(),
            empty: session,
            name,
            chat,
            keys,
            bodies: app::room_for_bodies(largest_file, &limits),
            largest_file,
            limits,
            memories,
            keeper,
            metrics,
        };
        Ok(Server { listener, address, app: Arc::new(app) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Memories that it has.
    pub fn memories(&self) -> usize {
        self.app.memories.count()
    }

    /// Serves until `stop`, then ends what runs, as far as the limits give it time, and keeps the memories.
    pub async fn run(self, stop: impl Future<Output = ()> + Send + 'static) -> std::io::Result<()> {
        let Server { listener, app, .. } = self;
        let threads = start(&app)?;
        let sweeper = tokio::spawn(sweep(app.clone()));
        let (tell, told) = oneshot::channel();
        let connections = tokio::spawn(connections::accept(listener, app.clone(), told));
        stop.await;
        let (now, ending) = (Instant::now(), app.limits.ending);
        let deadline = now + ending;
        let _ = tell.send(());
        // A third of the time is for reading what has come of texts that go on and on.
        let _ = tokio::time::timeout_at((now + ending / 3 * 2).into(), connections).await;
        sweeper.abort();
        let ended = tokio::task::spawn_blocking(move || end(&app, threads, deadline)).await;
        ended.map_err(std::io::Error::other)
    }
}

fn open(folder: PathBuf, most: u64) -> std::io::Result<Arc<Keeper>> {
    Keeper::open(&folder, most).map(Arc::new).map_err(|e| std::io::Error::new(e.kind(), format!("{}: {e}", folder.display())))
}

/// The threads that the model's work is done on, those that fill memories first, and the one that keeps them.
struct Threads {
    work: Vec<JoinHandle<()>>,
    keeper: Option<JoinHandle<()>>,
}

fn start(app: &Arc<App>) -> std::io::Result<Threads> {
    // Reading takes all cores, each answer one beside it: on threads that they share, a question would wait for whatever is being read.
    let thread = |name: &str, cores: usize, work: Box<dyn FnOnce() + Send>| {
        std::thread::Builder::new().name(name.into()).spawn(move || {
            let _own = armt::engine::own_threads(cores);
            work();
        })
    };
    let side_by_side = app.limits.texts;
    let (readings, questions) = (app.readings.clone(), app.questions.clone());
    let mut work = vec![
        thread("reading", 0, Box::new(move || readings.run()))?,
        thread("asking", 1, Box::new(move || questions.run_plain(side_by_side)))?,
    ];
    for _ in 0..app.readings.tokenizers() {
        let readings = app.readings.clone();
        work.push(thread("tokenizing", 1, Box::new(move || readings.run_tokenizer()))?);
    }
    for _ in 0..asking::THREADS {
        let questions = app.questions.clone();
        work.push(thread("answering", 1, Box::new(move || questions.run_other()))?);
    }
    let keeper = app.keeper.clone().map(|keeper| thread("keeping", 1, Box::new(move || keeper.run()))).transpose()?;
    Ok(Threads { work, keeper })
}

/// Ends the threads when they have done what waits, or when time is over, and keeps the memories.
fn end(app: &App, threads: Threads, deadline: Instant) {
    app.readings.end();
    app.questions.end();
    // Who had not gone by now has no connection any more: what is under way ends soon.
    while threads.work.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    if let Some(keeper) = &app.keeper {
        app.memories.all().iter().filter(|memory| !keeper.has(memory)).for_each(|memory| keeper.keep(memory));
        keeper.end();
    }
    threads.keeper.into_iter().for_each(|thread| drop(thread.join()));
}

/// Removes memories that nobody has used for as long as they stay.
async fn sweep(app: Arc<App>) {
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    loop {
        ticks.tick().await;
        app.remove_unused();
    }
}
