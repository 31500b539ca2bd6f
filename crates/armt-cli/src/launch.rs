//! Starts several processes that work together and ends them together: what `armt train --gpus N` is beside its children.
//!
//! Ctrl-C on a terminal would reach the children by itself, once each, but a signal to this process alone would not. So each child is in a process group
//! of its own, and this process hands on every signal exactly once: a second one makes a child quit at once.

use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// Time between two looks at the children.
const PAUSE: Duration = Duration::from_millis(20);
/// Children end together, after they have met a last time. Who is not at its end so long after another is waiting for it in vain.
const GRACE: Duration = Duration::from_secs(60);

/// How the children ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Ended {
    /// The code to exit with: 0, or that of the first child that failed.
    pub code: u8,
    /// The child that failed of itself, and how.
    pub failed: Option<(usize, String)>,
}

/// Children that were started. None is left behind.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // One that has ended cannot be killed, and need not be.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Runs processes until all have ended; when one fails the others are ended. `signals` counts those that are to be handed on.
pub fn run_together(commands: Vec<Command>, signals: &AtomicUsize) -> Result<Ended> {
    let mut children = Children(Vec::new());
    for mut command in commands {
        own_group(command.stdin(Stdio::null()));
        let program = command.get_program().to_owned();
        children.0.push(command.spawn().with_context(|| format!("{} could not be started", program.display()))?);
    }
    let (mut handed_on, mut first_end) = (0, None);
    let mut code = 0;
    loop {
        let mut running = 0;
        for (number, child) in children.0.iter_mut().enumerate() {
            let Some(status) = child.try_wait().with_context(|| format!("process {number}"))? else {
                running += 1;
                continue;
            };
            first_end.get_or_insert_with(Instant::now);
            let own = code_of(status);
            // Who was asked to stop and says so has not failed: others may still be at their end.
            let asked = own == 130 && handed_on > 0;
            if own != 0 && !asked {
                return Ok(Ended { code: own, failed: Some((number, status.to_string())) });
            }
            code = code.max(own);
        }
        if running == 0 {
            return Ok(Ended { code, failed: None });
        }
        if first_end.is_some_and(|end| end.elapsed() > GRACE) {
            let failed = children.0.iter_mut().position(|child| matches!(child.try_wait(), Ok(None)));
            let told = format!("was still running {} s after another had ended", GRACE.as_secs());
            return Ok(Ended { code: code.max(1), failed: failed.map(|number| (number, told)) });
        }
        let signals = signals.load(Ordering::Relaxed);
        while handed_on < signals {
            children.0.iter_mut().for_each(interrupt);
            handed_on += 1;
        }
        std::thread::sleep(PAUSE);
    }
}

/// The exit code as a shell would give it.
fn code_of(status: ExitStatus) -> u8 {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return 128u8.saturating_add(signal as u8);
    }
    status.code().map_or(1, |code| if code == 0 { 0 } else { (code as u8).max(1) })
}

#[cfg(unix)]
fn own_group(command: &mut Command) {
    std::os::unix::process::CommandExt::process_group(command, 0);
}

#[cfg(unix)]
fn interrupt(child: &mut Child) {
    // The number of one that has ended and was waited for may be another's by now.
    if !matches!(child.try_wait(), Ok(None)) {
        return;
    }
    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), nix::sys::signal::Signal::SIGINT);
}

#[cfg(not(unix))]
fn own_group(_command: &mut Command) {}

#[cfg(not(unix))]
fn interrupt(child: &mut Child) {
    let _ = child.kill();
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// A shell for each script; a process that is left behind would write its file.
    fn shells(scripts: &[String]) -> Vec<Command> {
        let shell = |script: &String| {
            // A shell cannot trap what was ignored when it began, as Ctrl-C is in a test run that itself is in the background.
            let mut command = Command::new("env");
            command.args(["--default-signal=INT", "sh", "-c", script]).stdout(Stdio::null()).stderr(Stdio::null());
            command
        };
        scripts.iter().map(shell).collect()
    }

    #[test]
    fn all_that_end_well_end_well() {
        let dir = tempfile::tempdir().unwrap();
        let scripts = [0, 1, 2].map(|n| format!("sleep 0.{n}; echo > {}/{n}", dir.path().display()));
        let ended = run_together(shells(&scripts), &AtomicUsize::new(0)).unwrap();
        assert_eq!(ended, Ended { code: 0, failed: None });
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
    }

    #[test]
    fn the_death_of_one_ends_the_others_with_its_code() {
        let dir = tempfile::tempdir().unwrap();
        let alive = dir.path().join("alive");
        for (death, code, told) in [("exit 7", 7, "exit status: 7"), ("kill -KILL $$", 137, "signal: 9")] {
            let scripts = [format!("sleep 30; echo > {}", alive.display()), format!("sleep 0.2; {death}"), "exec sleep 30".into()];
            let started = Instant::now();
            let ended = run_together(shells(&scripts), &AtomicUsize::new(0)).unwrap();
            assert_eq!(ended.code, code);
            assert!(matches!(&ended.failed, Some((1, how)) if how.contains(told)), "{ended:?}");
            assert!(started.elapsed() < Duration::from_secs(20), "the others were waited for");
        }
        assert!(!alive.exists());
    }

    #[test]
    fn every_signal_is_handed_on_once_and_who_stops_last_may_finish() {
        let dir = tempfile::tempdir().unwrap();
        // Both count what they get; the first to stop says so while the other is still saving.
        let script = |name: &str, saving: &str| {
            let file = dir.path().join(name);
            format!(
                "trap 'echo INT >> {0}; {saving}; echo saved >> {0}; exit 130' INT; echo ready > {0}.ready; \
                 n=0; while [ $n -lt 300 ]; do sleep 0.1; n=$((n+1)); done",
                file.display()
            )
        };
        let scripts = [script("slow", "sleep 1"), script("quick", "true")];
        let signals = AtomicUsize::new(0);
        let ended = std::thread::scope(|scope| {
            let running = scope.spawn(|| run_together(shells(&scripts), &signals).unwrap());
            while ["slow.ready", "quick.ready"].iter().any(|name| !dir.path().join(name).exists()) {
                std::thread::sleep(PAUSE);
            }
            signals.store(1, Ordering::Relaxed);
            running.join().unwrap()
        });
        assert_eq!(ended, Ended { code: 130, failed: None });
        for name in ["slow", "quick"] {
            assert_eq!(std::fs::read_to_string(dir.path().join(name)).unwrap(), "INT\nsaved\n", "{name}");
        }
    }

    #[test]
    fn a_program_that_is_not_there_ends_those_that_were_started() {
        let mut commands = shells(&["exec sleep 30".into()]);
        commands.push(Command::new("/nowhere/armt"));
        let started = Instant::now();
        let error = run_together(commands, &AtomicUsize::new(0)).unwrap_err();
        assert!(format!("{error:#}").contains("/nowhere/armt could not be started"), "{error:#}");
        assert!(started.elapsed() < Duration::from_secs(20));
    }
}
