//! The tree is the architecture: dependencies between the rooms of a crate go one way.
//!
//! The rooms of each crate are listed from the ground up, and a room may use those before it only. Within a room its modules must not use
//! each other in a ring. What is read are the paths that begin with `crate::`, `super::` or `self::`, outside of comments and tests.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Crates with their rooms, each above those that it may use.
const HOUSES: [(&str, &[&str]); 3] = [
    (
        "armt",
        &[
            "error",
            "random",
            "files",
            "compute",
            "backprop",
            "segment",
            "text",
            "weights",
            "state",
            "backbone",
            "memory",
            "config",
            "recurrence",
            "schedule",
            "checkpoint",
            "model",
            "probe",
            "adapter",
            "reader",
            "generate",
            "answer",
            "session",
        ],
    ),
    ("armt-lab", &["error", "carried", "tasks", "eval", "train", "bench"]),
    (
        "armt-serve",
        &[
            "refusal",
            "keys",
            "limits",
            "metrics",
            "memory",
            "keep",
            "reading",
            "asking",
            "template",
            "app",
            "routes",
            "connections",
        ],
    ),
];

/// A module by its path from the crate's root.
type Module = Vec<String>;

/// The modules of a crate, with the text of each without comments and tests.
fn modules(krate: &str) -> BTreeMap<Module, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(krate).join("src");
    let mut found = BTreeMap::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") && path.file_name().is_some_and(|n| n != "tests.rs") {
                found.insert(name(&root, &path), code(&std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    found
}

fn name(root: &Path, path: &Path) -> Module {
    let within: PathBuf = path.strip_prefix(root).unwrap().with_extension("");
    let mut parts: Module = within.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if parts.last().is_some_and(|last| last == "mod" || last == "lib") {
        parts.pop();
    }
    parts
}

/// A file without comments and without the tests at its end.
fn code(text: &str) -> String {
    let end = text.find("#[cfg(test)]\nmod ").unwrap_or(text.len());
    text[..end].lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Every path of a module's code that begins with `crate`, `super` or `self`, those in braces one by one.
fn paths(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(start) {
            let before = code[..at].chars().next_back();
            // `$crate::` of a macro, and `super::super::`, which its first part begins.
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':' || c == '$') {
                continue;
            }
            expand(&code[at..], &mut Vec::new(), &mut found);
        }
    }
    found
}

/// Reads one path, or several in braces, after `head`; gives how many bytes it took.
fn expand(text: &str, head: &mut Vec<String>, found: &mut Vec<Vec<String>>) -> usize {
    let depth = head.len();
    let mut at = 0;
    loop {
        let rest = &text[at..];
        let word: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if !word.is_empty() {
            at += word.len();
            head.push(word);
            if text[at..].starts_with("::") {
                at += 2;
                continue;
            }
        } else if rest.starts_with('{') {
            at += 1;
            while !text[at..].starts_with('}') && at < text.len() {
                let taken = expand(text[at..].trim_start(), head, found);
                at += text[at..].len() - text[at..].trim_start().len() + taken;
                // What is between two: a comma, `as name`.
                at += text[at..].find([',', '}']).unwrap_or(text.len() - at);
                at += usize::from(text[at..].starts_with(','));
                at += text[at..].len() - text[at..].trim_start().len();
            }
            head.truncate(depth);
            return at + 1;
        }
        found.push(head.clone());
        head.truncate(depth);
        return at;
    }
}

/// The module that a path of `from` leads to: the longest part of it that is one.
fn target(modules: &BTreeMap<Module, String>, from: &Module, path: &[String]) -> Module {
    let mut at = match path[0].as_str() {
        "crate" => Module::new(),
        "self" => from.clone(),
        _ => from[..from.len() - 1].to_vec(),
    };
    for part in &path[1..] {
        if part == "super" {
            at.pop();
            continue;
        }
        at.push(part.clone());
        if !modules.contains_key(&at) {
            at.pop();
            break;
        }
    }
    at
}

/// Whom each module uses, by the room that both are in: children of one parent.
fn uses(modules: &BTreeMap<Module, String>) -> BTreeMap<Module, BTreeSet<(String, String)>> {
    let mut edges: BTreeMap<Module, BTreeSet<(String, String)>> = BTreeMap::new();
    for (from, code) in modules.iter().filter(|(from, _)| !from.is_empty()) {
        for path in paths(code) {
            let to = target(modules, from, &path);
            let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            // A module may use what its own parent or child defines.
            if let (Some(user), Some(used)) = (from.get(common), to.get(common)) {
                edges.entry(from[..common].to_vec()).or_default().insert((user.clone(), used.clone()));
            }
        }
    }
    edges
}

/// A ring among modules, if there is one.
fn ring(edges: &BTreeSet<(String, String)>) -> Option<Vec<String>> {
    let mut left: BTreeSet<&(String, String)> = edges.iter().collect();
    loop {
        let (users, used): (BTreeSet<&String>, BTreeSet<&String>) = left.iter().map(|(user, used)| (user, used)).unzip();
        let before = left.len();
        // Whoever uses nobody that is left, or is used by none, is in no ring.
        left.retain(|edge| users.contains(&edge.1) && used.contains(&edge.0));
        if left.is_empty() {
            return None;
        }
        if left.len() == before {
            return Some(left.iter().map(|(user, used)| format!("{user} -> {used}")).collect());
        }
    }
}

#[test]
fn rooms_use_those_below_them_only() {
    for (krate, rooms) in HOUSES {
        let modules = modules(krate);
        let found: BTreeSet<&str> = modules.keys().filter(|m| m.len() == 1).map(|m| m[0].as_str()).collect();
        assert_eq!(found, rooms.iter().copied().collect(), "the rooms of {krate}, each in its place of the list");
        let level = |room: &str| rooms.iter().position(|r| *r == room).unwrap();
        for (user, used) in uses(&modules).remove(&Module::new()).unwrap_or_default() {
            assert!(level(&used) < level(&user), "{krate}: {user} uses {used}, which stands above it");
        }
    }
}

#[test]
fn modules_of_a_room_do_not_use_each_other_in_a_ring() {
    for (krate, _) in HOUSES {
        for (room, edges) in uses(&modules(krate)) {
            assert_eq!(ring(&edges), None, "{krate}, {}", room.join("::"));
        }
    }
}

#[test]
fn paths_are_read_as_they_are_meant() {
    let code = "use crate::{a::{b, c as d}, e};\nuse super::super::f;\nlet x = crate::g::h(self::i); $crate::j";
    let mut found: Vec<String> = paths(code).iter().map(|p| p.join("::")).collect();
    found.sort();
    assert_eq!(found, ["crate::a::b", "crate::a::c", "crate::e", "crate::g::h", "self::i", "super::super::f"]);
    let ring = ring(&[("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")].map(|(u, v)| (u.into(), v.into())).into());
    assert_eq!(ring.unwrap(), ["b -> c", "c -> b"]);
}
