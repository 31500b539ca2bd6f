//! `armt serve`: memories over HTTP.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use armt_serve::keys::Keys;
use armt_serve::{Server, Settings};
use clap::Args;

use crate::device::DeviceArgs;
use armt_shipped::find_model;

const EXAMPLE: &str = "\
Examples:
  armt serve models/babilong-qa1 --keep memories
  ID=$(curl -s -X POST localhost:8642/v1/memories | python3 -c 'import json, sys; print(json.load(sys.stdin)[\"id\"])')
  curl --data-binary @book.txt localhost:8642/v1/memories/$ID/text
  curl -d '{\"question\": \"Where is Mary?\"}' localhost:8642/v1/memories/$ID/ask

The page at / reads a book and asks it. /openapi.json has all paths.";

#[derive(Args)]
#[command(after_help = EXAMPLE)]
pub struct ServeArgs {
    /// Model folder, or the name of a model that the program carries.
    model: PathBuf,
    /// Adapter of the model, as training writes it (RUN/adapter), or its run's folder.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Address to listen on. One that others can reach needs --api-key-file.
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, value_name = "PORT", default_value_t = 8642)]
    port: u16,
    /// File with keys, one a line: clients have to send one of them (`Authorization: Bearer KEY`), and see only what was made with it.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Folder to keep memories in: a server that is started again has them again.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Name by which clients may call the server beside its address; can be given several times.
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Most memories at a time.
    #[arg(long, value_name = "N")]
    max_memories: Option<usize>,
    /// Most texts read side by side.
    #[arg(long, value_name = "N")]
    max_texts: Option<usize>,
    /// Most questions that may wait.
    #[arg(long, value_name = "N")]
    max_waiting: Option<usize>,
    /// Most tokens of an answer.
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// Most bytes of a body of JSON. Text for a memory has no bound.
    #[arg(long, value_name = "BYTES")]
    max_body: Option<u64>,
    /// Most connections at a time; further ones wait.
    #[arg(long, value_name = "N")]
    max_connections: Option<usize>,
    /// Most bytes in --keep.
    #[arg(long, value_name = "BYTES")]
    max_disk: Option<u64>,
    /// Delete memories that nobody has used for so many seconds.
    #[arg(long, value_name = "SECONDS")]
    idle: Option<u64>,
    #[command(flatten)]
    device: DeviceArgs,
}

pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    let folder = find_model(&args.model)?;
    let keys = match &args.api_key_file {
        Some(path) => Some(Keys::load(path).with_context(|| format!("--api-key-file {}", path.display()))?),
        None => None,
    };
    let loopback = args.host == "localhost" || args.host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
    if keys.is_none() && !loopback {
        bail!("--host {}: others can reach that address: expected --api-key-file", args.host);
    }
    let session = args.device.open_session(&args.model, args.adapter.as_deref())?;
    let name = session.owner().name.clone().unwrap_or_else(|| "model".into());
    let mut settings = Settings::new(name.clone(), session);
    (settings.folder, settings.keys, settings.keep) = (Some(folder), keys, args.keep.clone());
    settings.hosts.clone_from(&args.allow_host);
    let limits = &mut settings.limits;
    limits.memories = args.max_memories.unwrap_or(limits.memories);
    limits.texts = args.max_texts.unwrap_or(limits.texts);
    limits.questions = args.max_waiting.unwrap_or(limits.questions);
    limits.answer = args.max_tokens.unwrap_or(limits.answer);
    limits.body = args.max_body.unwrap_or(limits.body);
    limits.connections = args.max_connections.unwrap_or(limits.connections);
    limits.disk = args.max_disk.unwrap_or(limits.disk);
    limits.idle = args.idle.map(Duration::from_secs);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().context("threads")?;
    runtime.block_on(async {
        let server = Server::bind(&args.host, args.port, settings).await?;
        let kept = server.memories();
        if kept > 0 {
            crate::note(format_args!("memories kept from before: {kept}"));
        }
        crate::say(format_args!("{name} on http://{} (Ctrl-C ends it)", server.address()))?;
        server.run(stop()).await?;
        crate::note(format_args!("ended"));
        Ok(ExitCode::SUCCESS)
    })
}

/// Ctrl-C, or the wish of who started it.
async fn stop() {
    let interrupted = async { tokio::signal::ctrl_c().await.unwrap_or_default() };
    #[cfg(unix)]
    {
        let Ok(mut terminated) = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) else {
            return interrupted.await;
        };
        tokio::select! {
            () = interrupted => {}
            _ = terminated.recv() => {}
        }
    }
    #[cfg(not(unix))]
    interrupted.await;
}
