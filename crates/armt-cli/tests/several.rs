//! `armt train` on several GPUs, as far as it goes without one: what is refused, and by whom.

#![allow(clippy::unwrap_used)]
#![cfg(unix)]

mod support;
use support::{Place, text};

const RECIPE: &str = "[task]\nsetting = \"rewrite\"\n[memory]\nkind = \"associative\"\ntokens = 2\nd_mem = 4\n[model]\nwidth = 16\nlayers = 1\nheads = 2\n\
[[stage]]\npairs = 2\nbatch = 2\nsteps = 2\n";

fn place() -> Place {
    let place = Place(tempfile::tempdir().unwrap());
    std::fs::write(place.path("recipe.toml"), RECIPE).unwrap();
    place
}

/// The one line of error of a command that must fail, with variables of the environment.
fn bad(place: &Place, line: &str, variables: &[(&str, &str)]) -> String {
    let out = place.command(line).envs(variables.iter().copied()).output().unwrap();
    let said = text(&out.stderr);
    assert!(!out.status.success(), "{line} went well: {said}");
    let errors: Vec<&str> = said.lines().filter(|l| l.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{line}: {said}");
    assert!(!place.path("run").exists(), "{line} left a folder");
    errors[0].to_string()
}

/// No GPU is shown, also where there is one.
const NO_GPU: (&str, &str) = ("CUDA_VISIBLE_DEVICES", "");

#[test]
fn gpus_that_are_not_there_are_refused_before_anything_is_started() {
    let place = place();
    let train = "train recipe.toml --out run";
    for (flags, message) in [
        ("--gpus 0", "0 is not in 1..=65535"),
        ("--gpus two", "invalid digit"),
        (
            "--gpus 2 --device cpu",
            "--device cpu: expected a GPU for each of several processes; on CPUs the Python package trains over Gloo",
        ),
        ("--gpus 2", "--gpus 2: no CUDA device"),
        ("--gpus 2 --timeout 0", "expected a number of seconds, above 0"),
        ("--gpus 2 --set stage.1.steps=none", "steps"),
    ] {
        let said = bad(&place, &format!("{train} {flags}"), &[NO_GPU]);
        assert!(said.contains(message), "{flags}: {said}");
    }
    let said = bad(&place, &format!("{train} --gpus 65000"), &[]);
    assert!(said.contains("no CUDA device") || said.contains("expected at most "), "{said}");
}

#[test]
fn a_process_of_several_says_which_it_is_and_what_it_lacks() {
    let place = place();
    let second = [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), NO_GPU];
    let slurm = [("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_LOCALID", "1"), NO_GPU];
    let train = "train recipe.toml --out run";
    let said = bad(&place, &format!("{train} --device cpu"), &second);
    assert!(said.starts_with("error: process 1 of 2: --device cpu: expected a GPU"), "{said}");
    for variables in [second, slurm] {
        let said = bad(&place, train, &variables);
        assert!(said.contains("process 1 of 2: MASTER_ADDR: expected the address"), "{said}");
        // It goes on in a process with what NCCL needs in its environment, to where a GPU is missing.
        let said = bad(&place, train, &[&variables[..], &[("MASTER_ADDR", "127.0.0.1")]].concat());
        assert!(said.contains("process 1 of 2: expected a GPU for each of several processes; on CPUs"), "{said}");
        assert!(said.contains("no CUDA device"), "{said}");
    }
    assert!(bad(&place, &format!("{train} --gpus 3"), &second).contains("--gpus 3: expected none, or 2"));
    assert!(bad(&place, train, &[("RANK", "1")]).contains("WORLD_SIZE"));
}

#[test]
fn one_process_that_torchrun_started_trains_alone() {
    let place = place();
    let mut command = place.command("train recipe.toml --out run --device cpu");
    let out = command.envs([("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")]).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(place.path("run/best/model.safetensors").exists());
}
