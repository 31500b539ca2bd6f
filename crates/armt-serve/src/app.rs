//! What all requests share.

use std::net::IpAddr;
use std::sync::Arc;

use armt::Session;
use armt::state::Extent;
use tokio::sync::Semaphore;

use crate::asking::Questions;
use crate::keep::Keeper;
use crate::keys::{Client, Keys};
use crate::limits::Limits;
use crate::memory::{Memories, Memory};
use crate::metrics::Metrics;
use crate::reading::Readings;
use crate::refusal::Reply;
use crate::template::Template;

/// Bytes that one permit of [`App::bodies`] is for.
pub const PERMIT: u64 = 1 << 10;
/// Bytes that the file of a memory may have beside the memory's own: its names, and what is open of the text.
const AROUND: u64 = 16 << 20;

/// What all requests share.
pub struct App {
    /// What clients call the model.
    pub name: String,
    /// A session that has read nothing.
    pub empty: Session,
    /// How conversations are written for it.
    pub chat: Option<Template>,
    /// Who may ask.
    pub keys: Option<Keys>,
    /// Names that the server is called by.
    pub hosts: Vec<String>,
    /// How much is taken.
    pub limits: Limits,
    /// Bytes of a memory's file, at most.
    pub largest_file: u64,
    /// Room for bodies that are taken whole.
    pub bodies: Arc<Semaphore>,
    /// All memories.
    pub memories: Memories,
    /// Texts on their way into them.
    pub readings: Arc<Readings>,
    /// Questions that wait.
    pub questions: Arc<Questions>,
    /// Where memories are kept.
    pub keeper: Option<Arc<Keeper>>,
    /// What was done.
    pub metrics: Arc<Metrics>,
}

/// Bytes that the file of a session's memory may have. A memory that grows with its text has no size of its own.
pub fn largest_file(empty: &Session, limits: &Limits) -> u64 {
    let layout = empty.model().recurrence().layout();
    let grows = layout.parts.iter().flat_map(|part| &part.shape).any(|e| matches!(e, Extent::Segments(_)));
    let most = layout.bytes(empty.model().dtype()) as u64 * 2 + AROUND;
    if grows { most.max(limits.body) } else { most }
}

/// Room for bodies that are taken whole: for two of the largest, if that is more than the limit.
pub fn room_for_bodies(largest_file: u64, limits: &Limits) -> Arc<Semaphore> {
    let bytes = limits.bodies.max(2 * largest_file.max(limits.body));
    Arc::new(Semaphore::new(((bytes / PERMIT) as usize).min(Semaphore::MAX_PERMITS)))
}

impl App {
    /// Deletes a client's memory, and its file. A text that is on its way into it ends.
    pub fn remove(&self, id: &str, client: Client) -> Reply<()> {
        self.forget(&self.memories.remove(id, client)?);
        Ok(())
    }

    /// Removes memories that nobody has used for as long as they stay.
    pub fn remove_unused(&self) {
        self.memories.remove_unused().iter().for_each(|memory| self.forget(memory));
    }

    fn forget(&self, memory: &Arc<Memory>) {
        self.readings.give_up(memory);
        if let Some(keeper) = &self.keeper {
            keeper.forget(memory);
        }
    }

    /// Whether a client may call the server by this name, of a `Host` header: the address itself cannot be another's, a name could.
    pub fn knows_host(&self, host: &str) -> bool {
        let name = match host.strip_prefix('[') {
            Some(v6) => v6.split(']').next().unwrap_or_default(),
            None => host.split(':').next().unwrap_or_default(),
        };
        name.eq_ignore_ascii_case("localhost")
            || name.parse::<IpAddr>().is_ok()
            || self.hosts.iter().any(|known| known.eq_ignore_ascii_case(name))
    }
}
