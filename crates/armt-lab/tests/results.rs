//! Results side by side: seeds become means with their spread, tables go between a document's markers, and what does not fit is named.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use armt_lab::eval::plot::Mark;
use armt_lab::eval::results::{Comparison, Experiment, Measure, fill, regenerate};
use armt_lab::eval::retrieval::{Point, Report, StateSize};
use armt_lab::tasks::retrieval::Setting;

fn report(task: Setting, curve: &[(usize, f64)]) -> Report {
    let point = |(pairs, exact_match): &(usize, f64)| Point {
        pairs: *pairs,
        samples: 10,
        exact_match: *exact_match,
        stored: exact_match * *pairs as f64,
    };
    Report {
        model: "m".into(),
        name: None,
        trained_pairs: None,
        steps: None,
        minutes: None,
        trained_on: None,
        state: None,
        task,
        key_size: 1,
        value_size: 1,
        symbols: 16,
        samples: 10,
        batch: 5,
        seed: 0,
        dtype: "f32".into(),
        points: curve.iter().map(point).collect(),
    }
}

#[test]
fn a_report_with_numbers_that_cannot_be_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("r.json");
    report(Setting::Remember, &[(10, 0.5)]).save(&path).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(Report::load(&path).is_ok());
    for (old, new) in [
        ("\"exact_match\": 0.5", "\"exact_match\": 65536"),
        ("\"exact_match\": 0.5", "\"exact_match\": -0.1"),
        ("\"stored\": 5.0", "\"stored\": 1e300"),
        ("\"pairs\": 10", "\"pairs\": 0"),
        ("\"task\"", "\"minutes\": -1, \"task\""),
    ] {
        assert!(text.contains(old), "{old}");
        std::fs::write(&path, text.replace(old, new)).unwrap();
        let error = Report::load(&path).unwrap_err().to_string();
        assert!(error.contains("r.json") && error.contains("expected"), "{new}: {error}");
    }
}

/// Results with three models of Rewrite, one of them of two seeds, and one of Remember; and a README for both.
fn results() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    let save = |name: &str, report: Report| {
        let path = place.path().join("results").join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        report.save(&path).unwrap();
    };
    let rewrite = |curve| report(Setting::Rewrite, curve);
    let trained = |r: Report, minutes| Report {
        trained_pairs: Some(50),
        steps: Some(minutes as usize * 1000 - 5000),
        minutes: Some(minutes),
        trained_on: Some("one core".into()),
        state: Some(StateSize { numbers: 33_024, growth: 0 }),
        ..r
    };
    save("rewrite/armt.json", Report { name: Some("ARMT".into()), ..trained(rewrite(&[(1, 1.0), (50, 0.5)]), 6.0) });
    save("rewrite/armt.seed1.json", trained(rewrite(&[(50, 0.75), (1, 1.0)]), 7.0));
    save("rewrite/armt-nogamma.json", Report { trained_pairs: Some(40), ..rewrite(&[(1, 1.0), (200, 0.125)]) });
    save("rewrite/rmt.v2.json", rewrite(&[(1, 0.5)]));
    let state = Some(StateSize { numbers: 1000, growth: 512 });
    save("remember/armt.json", Report { state, ..report(Setting::Remember, &[(10, 1.0), (500, 0.25)]) });
    std::fs::create_dir(place.path().join("results/rewrite/armt")).unwrap();
    std::fs::write(place.path().join("results/rewrite/armt.validations.jsonl"), "{}").unwrap();
    let readme = "# A\n<!-- results: remember -->\n<!-- end -->\nbetween\n<!-- results: rewrite -->\nold\n<!-- end -->\nlast\n";
    std::fs::write(place.path().join("README.md"), readme).unwrap();
    place
}

fn run(place: &Path) -> armt_lab::Result<Vec<String>> {
    let files = regenerate(&place.join("results"), &[place.join("README.md")])?;
    Ok(files.iter().map(|f| f.strip_prefix(place).unwrap().display().to_string()).collect())
}

#[test]
fn seeds_of_one_name_become_their_mean_and_spread() {
    let of = |curve: &[(usize, f64)]| ("A".to_string(), report(Setting::Rewrite, curve));
    let models = Comparison::of(Measure::ExactMatch, [of(&[(5, 0.5), (1, 1.0)]), of(&[(5, 0.75)])]).unwrap().models;
    assert_eq!(models.len(), 1);
    let want = [Mark { x: 1.0, y: 1.0, spread: None }, Mark { x: 5.0, y: 0.625, spread: Some((0.5, 0.75)) }];
    assert_eq!(models[0].marks(Measure::ExactMatch), want);
    assert_eq!(models[0].marks(Measure::Stored)[1].spread, Some((2.5, 3.75)));
}

#[test]
fn tables_go_between_their_markers_and_again_changes_nothing() {
    let place = results();
    let files = run(place.path()).unwrap();
    assert_eq!(files, ["results/remember/stored-pairs.svg", "results/rewrite/exact-match.svg", "README.md"]);
    let read = |name: &str| std::fs::read_to_string(place.path().join(name)).unwrap();
    let want = "# A
<!-- results: remember -->

| stored pairs at pairs | 10 | 500 | trained on up to | steps | minutes | state in numbers | seeds |
| --- | --- | --- | --- | --- | --- | --- | --- |
| armt | 10.0 | 125.0 | - | - | - | 1,000, and 512 a segment | 1 |

<!-- end -->
between
<!-- results: rewrite -->

| exact match at pairs | 1 | 50 | 200 | trained on up to | steps | minutes | state in numbers | seeds |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| ARMT | 1.000 | 0.625 (0.500 to 0.750) | - | 50 | 1,500 | 6.5 of one core | 33,024 | 2 |
| armt-nogamma | 1.000 | - | 0.125 | 40 | - | - | - | 1 |
| rmt.v2 | 0.500 | - | - | - | - | - | - | 1 |

<!-- end -->
last
";
    assert_eq!(read("README.md"), want);
    let svg = read("results/rewrite/exact-match.svg");
    assert!(svg.contains(">ARMT<") && svg.contains(">trained on up to 50<") && svg.contains(">trained on up to 40<"));
    assert!(read("results/remember/stored-pairs.svg").contains(">all of them<"));
    run(place.path()).unwrap();
    assert_eq!(read("README.md"), want);
    assert_eq!(read("results/rewrite/exact-match.svg"), svg);
}

#[test]
fn a_trained_length_of_several_models_is_marked_once() {
    let trained = |n| Report { trained_pairs: n, ..report(Setting::Rewrite, &[(1, 1.0), (100, 0.5)]) };
    let guides = |lengths: [Option<usize>; 2]| {
        let reports = lengths.into_iter().zip(["a", "b"]).map(|(n, name)| (name.to_string(), trained(n)));
        let guides = Comparison::of(Measure::ExactMatch, reports).unwrap().plot(None).guides;
        guides.iter().map(|g| (g.x, g.series)).collect::<Vec<_>>()
    };
    assert_eq!(guides([Some(50), Some(50)]), [(50.0, None)]);
    assert_eq!(guides([Some(50), Some(40)]), [(50.0, Some(0)), (40.0, Some(1))]);
    assert_eq!(guides([None, Some(40)]), [(40.0, Some(1))]);
}

#[test]
fn what_does_not_fit_is_named_and_nothing_is_written() {
    let refused = |change: &dyn Fn(&Path), words: &[&str]| {
        let place = results();
        change(place.path());
        let before = std::fs::read_to_string(place.path().join("README.md")).ok();
        let said = run(place.path()).unwrap_err().to_string();
        assert!(words.iter().all(|w| said.contains(w)), "{said}");
        assert!(!place.path().join("results/rewrite/exact-match.svg").exists());
        assert_eq!(std::fs::read_to_string(place.path().join("README.md")).ok(), before);
    };
    let write = |place: &Path, name: &str, text: &str| std::fs::write(place.join(name), text).unwrap();
    let marker = "<!-- results: rewrite -->";
    refused(&|p| write(p, "README.md", "<!-- results: remember -->\n<!-- end -->\n"), &["README.md", marker]);
    let open = "<!-- results: remember -->\n<!-- results: rewrite -->\n<!-- end -->\n";
    refused(&|p| write(p, "README.md", open), &["README.md", "<!-- end -->", "remember"]);
    refused(&|p| std::fs::remove_file(p.join("README.md")).unwrap(), &["README.md"]);
    refused(&|p| write(p, "results/rewrite/odd.json", "{}"), &["odd.json", "report of `armt eval`"]);
    let of_remember = |p: &Path| report(Setting::Remember, &[(1, 1.0)]).save(&p.join("results/rewrite/odd.json")).unwrap();
    refused(&of_remember, &["odd.json", "expected a report of rewrite"]);
    let empty = |p: &Path| report(Setting::Rewrite, &[]).save(&p.join("results/rewrite/odd.json")).unwrap();
    refused(&empty, &["odd.json", "at least one point"]);
    let place = tempfile::tempdir().unwrap();
    assert!(regenerate(place.path(), &[]).unwrap_err().to_string().contains("in remember/, rewrite/ or babilong/, found none"));
}

#[test]
fn each_document_has_the_tables_whose_markers_it_has() {
    let place = results();
    let [one, other] = ["README.md", "other.md"].map(|name| place.path().join(name));
    std::fs::write(&one, "<!-- results: remember -->\n<!-- end -->\n").unwrap();
    std::fs::write(&other, "# B\n<!-- results: rewrite -->\n<!-- end -->\n").unwrap();
    let files = regenerate(&place.path().join("results"), &[one.clone(), other.clone()]).unwrap();
    assert_eq!(files.len(), 4);
    let read = |path| std::fs::read_to_string(path).unwrap();
    assert!(read(&one).contains("stored pairs at pairs") && !read(&one).contains("exact match"));
    assert!(read(&other).contains("exact match at pairs") && !read(&other).contains("stored"));
}

#[test]
fn the_projects_tables_are_those_of_its_results() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let experiments = Experiment::all(&root.join("results")).unwrap();
    let mut tables = 0;
    for name in ["README.md", "docs/retrieval.md", "docs/babilong.md"] {
        let text = std::fs::read_to_string(root.join(name)).unwrap();
        tables += text.matches("<!-- results:").count();
        let again = "armt report results --readme README.md,docs/retrieval.md,docs/babilong.md";
        assert!(fill(&text, &experiments).unwrap() == text, "{name} has other tables than `{again}` writes");
    }
    assert!(tables >= experiments.len(), "{tables}");
}

#[test]
fn reports_of_one_name_that_are_of_different_texts_are_no_seeds() {
    let one = report(Setting::Remember, &[(1, 1.0)]);
    for (other, said) in [
        (Report { task: Setting::Rewrite, ..one.clone() }, "armt: expected reports of one task"),
        (Report { key_size: 3, ..one.clone() }, "armt: expected reports of one key_size"),
        (Report { value_size: 2, ..one.clone() }, "value_size"),
        (Report { symbols: 26, ..one.clone() }, "16 and 26"),
    ] {
        let pair = |names: [&str; 2]| {
            Comparison::of(Measure::Stored, names.map(String::from).into_iter().zip([one.clone(), other.clone()]))
        };
        let error = pair(["armt"; 2]).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
        assert_eq!(pair(["armt", "other"]).unwrap().models.len(), 2);
    }
    // Another seed, model and type of numbers are what seeds differ in.
    let seed = Report { seed: 1, model: "n".into(), dtype: "bf16".into(), samples: 20, ..one.clone() };
    assert_eq!(Comparison::of(Measure::Stored, [("armt".into(), one), ("armt".into(), seed)]).unwrap().models.len(), 1);
}
