//! A folder that commands run in, with a backbone to begin with.

#![allow(dead_code)] // each test binary uses its part

use std::path::PathBuf;
use std::process::Command;

#[path = "../../../armt/tests/support/tiny_gpt2.rs"]
mod tiny_gpt2;

/// A folder with a tiny GPT-2 in `gpt2`; commands run in it.
pub struct Place(pub tempfile::TempDir);

impl Place {
    /// The folder.
    pub fn new() -> Self {
        let place = Place(tempfile::tempdir().unwrap());
        tiny_gpt2::write(&place.path("gpt2"));
        place
    }

    /// A place with a backbone in `gpt2` and the model that has a memory around it in `model`.
    pub fn with_model(self) -> Self {
        self.good("convert gpt2 model --kind associative --tokens 2 --d-mem 4 --segment 16");
        self
    }

    /// A file in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// `armt` with the words of a line.
    pub fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_armt"));
        let data = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data");
        command.current_dir(self.0.path()).env("ARMT_DATA", data).args(line.split(' ').filter(|w| !w.is_empty()));
        command
    }

    /// Runs a command that must succeed, and gives what it printed.
    pub fn good(&self, line: &str) -> String {
        let out = self.command(line).output().unwrap();
        assert!(out.status.success(), "{line}: {}", text(&out.stderr));
        text(&out.stdout)
    }

    /// Runs a command that must fail, and gives its one line of error.
    pub fn bad(&self, line: &str) -> String {
        let out = self.command(line).output().unwrap();
        assert!(!out.status.success(), "{line} went well");
        let said = text(&out.stderr);
        let errors: Vec<&str> = said.lines().filter(|l| l.starts_with("error: ")).collect();
        assert_eq!(errors.len(), 1, "{line}: {said}");
        errors[0].to_string()
    }
}

/// What a command printed.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
