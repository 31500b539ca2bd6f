//! What once lost data, hung or ended with a panic, as a user types it.

#![allow(clippy::unwrap_used)]

mod support;

use std::process::Stdio;

use support::{Place, text};

fn place() -> Place {
    let place = Place::new().with_model();
    std::fs::write(place.path("text.txt"), "the cat sat in the hat. ".repeat(200)).unwrap();
    place
}

#[test]
fn quickstart_removes_nothing_but_what_it_made() {
    let place = place();
    for (file, kept) in [("out/armt/thesis.tex", "armt/thesis.tex"), ("out/no-memory/last/mine.txt", "mine.txt")] {
        let path = place.path(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "mine").unwrap();
        let said = place.bad("quickstart --out out --force");
        assert!(said.contains("not removed") && said.contains(kept), "{said}");
        assert!(path.exists());
        std::fs::remove_dir_all(place.path("out")).unwrap();
    }
    std::fs::write(place.path("file"), "mine").unwrap();
    assert!(place.bad("quickstart --out file --force").contains("got a file"));
    assert_eq!(std::fs::read(place.path("file")).unwrap(), b"mine");
}

#[test]
fn a_memory_that_could_not_be_written_is_refused_before_anything_is_read() {
    let place = place();
    let long = "m".repeat(300);
    // A model that cannot be loaded would be named first if it were looked at.
    std::fs::write(place.path("model/model.safetensors"), "broken").unwrap();
    for out in [long.as_str(), "model", "/dev/null", "nowhere/out.mem"] {
        let said = place.bad(&format!("read model text.txt --memory {out} --force --device cpu"));
        assert!(said.contains(out) && !said.contains("safetensors"), "{said}");
    }
    for out in [long.as_str(), "model", "/dev/null"] {
        let said = place.bad(&format!("eval model --task remember --out {out} --device cpu"));
        assert!(said.contains(out) && !said.contains("safetensors"), "{said}");
    }
}

#[cfg(unix)]
#[test]
fn a_link_that_is_written_to_stays_one() {
    let place = place();
    std::fs::write(place.path("real.mem"), "old").unwrap();
    std::os::unix::fs::symlink(place.path("real.mem"), place.path("link.mem")).unwrap();
    place.good("read model text.txt --memory link.mem --force --device cpu");
    assert!(std::fs::symlink_metadata(place.path("link.mem")).unwrap().is_symlink());
    assert!(std::fs::read(place.path("real.mem")).unwrap().len() > 100);
}

#[test]
fn sizes_without_bounds_and_times_without_end_are_refused_by_name() {
    let place = place();
    std::fs::write(
        place.path("recipe.toml"),
        "[task]\nsetting = \"remember\"\n[memory]\nkind = \"associative\"\ntokens = 2\nd_mem = 4\n[[stage]]\npairs = 2\nbatch = 2\nsteps = 1\n",
    )
    .unwrap();
    let most = usize::MAX;
    for line in [
        format!("convert gpt2 out --kind associative --segment {most}"),
        format!("convert gpt2 out --kind associative --tokens {most}"),
        format!("convert gpt2 out --kind associative --d-mem {most}"),
        format!("convert gpt2 out --kind none --segment {most}"),
        format!("eval model --task rewrite --key-size 10 --value-size 4 --pairs {most} --device cpu"),
        format!("eval model --task remember --key-size 10 --value-size 4 --pairs 1 --batch {most} --samples {most} --device cpu"),
        format!("bench train-retrieval --device cpu --segments {most}"),
        format!("bench train-retrieval --device cpu --batch {most}"),
        format!("bench train-retrieval --device cpu --layers {most}"),
        format!("bench train-retrieval --device cpu --segments 1 --batch 1 --layers 1 --repeats {most}"),
        "train recipe.toml --out run --set stage.1.batch=9000000000000000000".into(),
        "train recipe.toml --out run --set eval.batch=9000000000000000000 --set eval.samples=9000000000000000000".into(),
        "train recipe.toml --out run --minutes inf".into(),
        "train recipe.toml --out run --minutes nan".into(),
        "train recipe.toml --out run --minutes=-1".into(),
        "train recipe.toml --out run --minutes 1e300".into(),
    ] {
        let out = place.command(&line).output().unwrap();
        let said = text(&out.stderr);
        let code = out.status.code();
        assert!(code == Some(1) || code == Some(2), "{line}: {:?} {said}", out.status);
        assert!(said.contains("error: ") && !said.contains("panicked"), "{line}: {said}");
    }
}

/// Standard error that nobody hears any more: `armt .. 2>&1 >out | head -0`.
#[cfg(unix)]
#[test]
fn a_closed_standard_error_ends_nothing() {
    let place = place();
    for line in ["read model text.txt --memory out.mem", "read model nowhere.txt --memory x.mem"] {
        let mut child = place.command(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stderr.take());
        let out = child.wait_with_output().unwrap();
        assert_eq!(out.status.code(), Some(i32::from(line.contains("nowhere"))), "{line}: {:?}", out.status);
    }
    assert!(place.path("out.mem").exists());
}

#[test]
fn what_is_no_tokens_yet_is_not_counted_and_is_told_where_it_is_large() {
    let place = place();
    std::fs::write(place.path("word.txt"), format!("the cat {}", "x".repeat(10_000))).unwrap();
    let said = place.good("read model word.txt --memory word.mem --device cpu");
    assert!(!said.starts_with("10,0") && said.contains("its last 10,001 bytes are no tokens yet"), "{said}");
    let said = place.good("read model text.txt --memory text.mem --device cpu");
    assert!(!said.contains("no tokens yet"), "{said}");
}

#[test]
fn a_model_that_keeps_nothing_does_not_read() {
    let place = place();
    let said = place.bad("read gpt2 text.txt --memory out.mem --device cpu");
    assert!(said.contains("no memory") && said.contains("armt convert"), "{said}");
    assert!(!place.path("out.mem").exists());
}
