use armt::memory::{Associative, Rmt};
use serde_json::json;

use super::*;
use crate::tasks::babi::Task;
use crate::tasks::babilong::BabilongLessons;
use crate::tasks::retrieval::{EOS, RetrievalLessons, VOCAB};

fn stories(recipe: &Recipe) -> Vec<Task> {
    recipe.lessons_of::<BabilongLessons>().unwrap().stories().unwrap()
}

const RECIPE: &str = r#"
seed = 3
[task]
setting = "remember"
[memory]
kind = "associative"
tokens = 4
d_mem = 32
[[stage]]
pairs = 2
batch = 8
steps = 10
[[stage]]
pairs = 20
key_size = 2
batch = 8
steps = 20
"#;

fn refused(text: &str, words: &[&str]) {
    let error = Recipe::parse(text, &[]).err().unwrap().to_string();
    assert!(words.iter().all(|w| error.contains(w)), "{error}");
}

#[test]
fn numbers_that_are_none_or_that_no_machine_could_hold_are_refused_by_their_keys() {
    let with = |change: &str| Recipe::parse(RECIPE, &[change.into()]).err().map(|e| e.to_string());
    for key in ["weight_decay", "clip_value", "clip_norm", "warmup", "decay", "lr"] {
        for value in ["nan", "-1.0", "inf"] {
            let error = with(&format!("optimizer.{key}={value}"));
            assert!(error.as_ref().is_some_and(|e| e.contains(key)), "{key}={value}: {error:?}");
        }
    }
    for (change, word) in [
        ("optimizer.warmup=1.5", "warmup"),
        ("model.init=nan", "model.init"),
        ("model.init=-0.1", "model.init"),
        ("stage.1.lr=nan", "lr"),
        ("stage.1.lr=0.0", "lr"),
        ("stage.2.decay=-2.0", "decay"),
        ("stage.1.carry=nan", "carry"),
        ("stage.1.until=nan", "until"),
        ("stage.1.batch=9223372036854775807", "pairs by texts"),
        ("stage.1.questions=9223372036854775807", "pairs by texts"),
        ("stage.1.batch=1000000000000", "pairs by texts"),
        ("task.value_size=9223372036854775807", "pairs by texts"),
        ("model.layers=9223372036854775807", "layers by width"),
        ("model.width=9223372036854775804", "width"),
        ("model.inner=1000000000000", "inner width"),
        ("memory.tokens=9223372036854775807", "tokens"),
        ("memory.d_mem=4611686018427387904", "d_mem"),
    ] {
        let error = with(change);
        assert!(error.as_ref().is_some_and(|e| e.contains(word)), "{change}: {error:?}");
    }
}

#[test]
fn a_recipe_has_the_papers_defaults() {
    let r = Recipe::parse(RECIPE, &[]).unwrap();
    assert!(matches!(r.model, ModelRecipe::Fresh(shape) if (shape.layers, shape.width) == (4, 128)));
    assert_eq!((r.optimizer.lr, r.seed), (3e-4, 3));
    let config = r.config(1, &r.fresh(VOCAB, EOS).unwrap());
    assert_eq!(config.segment_size, 5);
    assert!(armt::recurrence::check(&config).is_ok());
}

#[test]
fn mistakes_are_named_with_their_line_and_key() {
    refused(&RECIPE.replace("tokens", "tokenz"), &["tokenz"]);
    refused(&RECIPE.replace("batch = 8", "batch = \"many\""), &["line 11"]);
    refused(&RECIPE.replace("pairs = 20\nkey_size = 2", "pairs = 20"), &["stage 2", "line 13", "16", "20"]);
    refused(&RECIPE.replace("steps = 10", "steps = 0"), &["stage 1", "steps"]);
    refused(&format!("{RECIPE}questions = 0"), &["stage 2 (line 13)", "questions"]);
    refused(&format!("{RECIPE}carry = 1.5"), &["stage 2 (line 13)", "carry", "from 0 to 1"]);
    refused(&format!("{RECIPE}carry = 0.5\naccumulate = 2"), &["stage 2 (line 13)", "accumulate", "carried on"]);
    let rmt = RECIPE.replace("associative", "rmt").replace("d_mem = 32\n", "");
    refused(&format!("{rmt}carry = 0.5"), &["stage 2 (line 12)", "carry", "not associative"]);
    refused(&RECIPE.replace("setting = \"remember\"", "setting = \"forget\""), &["forget"]);
    refused("seed = 1", &["stage"]);
    refused(&RECIPE.replace("setting = \"remember\"", ""), &["task.setting", "none"]);
    refused(&RECIPE.replace("[memory]\nkind = \"associative\"\ntokens = 4\nd_mem = 32\n", ""), &["memory: expected", "none"]);
    refused(&RECIPE.replace("[memory]", "symbols = 101\n[memory]"), &["task (line 5)", "symbols: expected 2 to 100", "101"]);
    refused(&format!("{RECIPE}symbols = 1"), &["stage 2 (line 13)", "symbols: expected 2 to 100", "got 1"]);
    refused(&RECIPE.replace("[memory]", "symbols = \"many\"\n[memory]"), &["line 5", "many"]);
    refused(&RECIPE.replace("[memory]", "symbols = 4\n[memory]"), &["stage 2 (line 14)", "only 16 of 2 of 4 symbols"]);
}

#[test]
fn a_value_of_the_wrong_kind_is_told_without_the_names_of_rusts_types() {
    let set = |from: &str, to: &str| RECIPE.replacen(from, to, 1);
    refused(
        &set("batch = 8", "batch = \"many\""),
        &["stage.1.batch", "expected a whole number that is not negative, got string \"many\""],
    );
    refused(&set("batch = 8", "batch = -4"), &["stage.1.batch", "expected a whole number that is not negative, got integer `-4`"]);
    refused(&set("batch = 8", "batch = 8\nlr = \"fast\""), &["stage.1.lr", "expected a number, got string \"fast\""]);
    refused(&set("batch = 8", "batch = 8\nvary = 1"), &["stage.1.vary", "expected true or false, got integer `1`"]);
}

#[test]
fn stages_have_the_keys_of_their_task_and_no_others() {
    let babilong = RECIPE
        .replace("\"remember\"", "\"babilong\"")
        .replace("pairs = 2\n", "segment = 16\nsegments = 2\n")
        .replace("pairs = 20\nkey_size = 2", "segment = 512\nsegments = 8\nfacts = 4\naligned = true");
    let r = Recipe::parse(&babilong, &[]).unwrap();
    let config = r.config(1, &r.fresh(1000, 3).unwrap());
    assert_eq!(
        (config.segment_size, &config.backbone["vocab_size"], stories(&r)),
        (512, &json!(1000), vec![Task::new(1).unwrap()])
    );
    refused(&format!("{babilong}pairs = 3"), &["stage.2.pairs (line 21)", "unknown field `pairs`"]);
    refused(&babilong.replace("segments = 8\n", ""), &["stage.2 (line 14)", "missing field `segments`"]);
    let of = |stories: &str| babilong.replace("[memory]", &format!("stories = {stories}\n[memory]"));
    refused(&of("\"qa7\""), &["line 5", "qa1 to qa5", "qa7"]);
    refused(&of("[\"qa1\", \"qa6\"]"), &["line 5", "qa1 to qa5", "qa6"]);
    refused(&of("[]"), &["task.stories", "at least one task"]);
    refused(&of("1"), &["task.stories", "a name, or a list of names"]);
    let several = stories(&Recipe::parse(&of("[\"qa2\", \"qa4\"]"), &[]).unwrap());
    assert_eq!(several, [2, 4].map(|n| Task::new(n).unwrap()));
    refused(&babilong.replace("[memory]", "forms = [\"now\", \"old\"]\n[memory]"), &["old"]);
    refused(&babilong.replace("[memory]", "forms = []\n[memory]"), &["line 5", "task.forms", "at least one form"]);
    for key in
        ["alone = 0.5", "clusters = 0.5", "distract = 3", "again = 0.5", "prefer = { questions = \"What did\", share = 0.5 }"]
    {
        assert!(Recipe::parse(&format!("{babilong}{key}"), &[]).is_ok(), "{key}");
        refused(&format!("{RECIPE}{key}"), &["(line 18)", "unknown field"]);
    }
    for key in ["alone", "again", "gifts", "cut"] {
        refused(&format!("{babilong}{key} = 1.5"), &["stage 2 (line 14)", key, "from 0 to 1"]);
    }
    refused(
        &format!("{babilong}prefer = {{ questions = \"Who\", share = 2 }}"),
        &["stage 2 (line 14)", "prefer.share", "from 0 to 1"],
    );
    refused(&format!("{RECIPE}segment = 3"), &["stage.2.segment (line 18)", "unknown field `segment`"]);
    refused(&format!("{RECIPE}aligned = true"), &["stage.2.aligned (line 18)", "unknown field `aligned`"]);
    refused(&format!("{RECIPE}direct = true"), &["stage.2.direct (line 18)", "unknown field `direct`"]);
    refused(&RECIPE.replace("pairs = 2\n", ""), &["stage.1 (line 9)", "missing field `pairs`"]);
}

#[test]
fn a_task_has_the_authors_symbols_or_its_own() {
    let symbols = |text: &str, changes: &[String]| {
        let r = Recipe::parse(text, changes).unwrap();
        r.lessons_of::<RetrievalLessons>().unwrap().stage(1).unwrap().0.symbols
    };
    assert_eq!(symbols(RECIPE, &[]), 16);
    assert_eq!(symbols(&RECIPE.replace("[memory]", "symbols = 32\n[memory]"), &[]), 32);
    assert_eq!(symbols(RECIPE, &["task.symbols=64".into()]), 64);
    assert_eq!(symbols(&format!("{RECIPE}symbols = 8"), &["task.symbols=64".into()]), 8);
    let error = Recipe::parse(RECIPE, &["task.symbols=1".into()]).err().unwrap().to_string();
    assert_eq!(error, "task (line 3): symbols: expected 2 to 100, the tokens below the marks, got 1");
}

#[test]
fn a_model_has_a_shape_or_comes_from_a_folder() {
    let with = |keys: &str| format!("[model]\n{keys}\n{RECIPE}").replace("seed = 3", "");
    let r = Recipe::parse(&with("width = 64"), &[]).unwrap();
    assert!(matches!(r.model, ModelRecipe::Fresh(shape) if shape == FreshModel { width: 64, ..FreshModel::default() }));
    let r = Recipe::parse(RECIPE, &["model.from=some/folder".into()]).unwrap();
    assert!(matches!(&r.model, ModelRecipe::From(folder) if folder == Path::new("some/folder")));
    assert!(r.fresh(VOCAB, EOS).is_err());
    refused(&with("from = \"folder\"\nwidth = 64"), &["line 1", "model.width: expected no such key beside from", "got 64"]);
    refused(&with("from = \"folder\"\ntied = true"), &["model.tied", "got true"]);
    refused(&with("widht = 64"), &["line 2", "widht"]);
    let babilong = "[task]\nsetting = \"babilong\"\nvocabulary = 500\n[model]\nfrom = \"folder\"\n[[stage]]\nsegment = 4\nsegments = 2\nbatch = 1\nsteps = 1";
    refused(babilong, &["line 3", "task.vocabulary", "model.from"]);
}

#[test]
fn a_stage_may_have_a_rate_of_its_own() {
    let changes = ["stage.2.steps=100", "stage.2.lr=1e-4", "stage.2.decay=1"].map(String::from);
    let r = Recipe::parse(RECIPE, &changes).unwrap();
    let [first, second] = [0, 1].map(|i| r.schedule(&r.stages[i]));
    assert_eq!((second.peak, second.decay), (1e-4, Decay::Linear { total: 100 }));
    assert_ne!((first.peak, first.decay), (second.peak, second.decay));
}

#[test]
fn single_values_can_be_changed() {
    let changes = ["optimizer.lr=1e-3", "seed=9", "stage.2.steps=7", "memory.correction=false"].map(String::from);
    let r = Recipe::parse(RECIPE, &changes).unwrap();
    assert_eq!((r.optimizer.lr, r.seed, r.stages[1].steps), (1e-3, 9, 7));
    assert!(!r.memory.as_ref().unwrap().whole().unwrap().get::<Associative>().unwrap().correction);
    for bad in ["seed", "stage.5.steps=1", "optimizer.speed=1"] {
        assert!(Recipe::parse(RECIPE, &[bad.into()]).is_err(), "{bad}");
    }
}

/// A folder with recipes of these names and texts.
fn recipes(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    files.iter().for_each(|(name, text)| std::fs::write(folder.path().join(name), text).unwrap());
    folder
}

#[test]
fn a_stage_that_never_ends_early_says_so_and_old_recipes_say_it_with_a_number() {
    let until = |value: &str| Recipe::parse(&format!("{RECIPE}until = {value}"), &[]).map(|r| r.stages[1].until);
    assert_eq!(until("\"never\"").unwrap(), Until::Never);
    assert_eq!(until("2.0").unwrap(), Until::Never);
    assert_eq!(until("2").unwrap(), Until::Never);
    assert_eq!(until("0.97").unwrap(), Until::Reached(0.97));
    assert_eq!(Recipe::parse(RECIPE, &[]).unwrap().stages[0].until, Until::Reached(1.0));
    assert!(Until::Reached(0.5).reached(0.5) && !Until::Reached(0.5).reached(0.49) && !Until::Never.reached(1.0));
    for bad in ["\"ever\"", "-0.5", "nan", "true"] {
        let said = until(bad).unwrap_err().to_string();
        assert!(said.contains("stage.2.until (line 18)") && said.contains("\"never\""), "{bad}: {said}");
    }
    assert_eq!(Recipe::parse(RECIPE, &["stage.1.until=never".into()]).unwrap().stages[0].until, Until::Never);
}

#[test]
fn a_recipe_that_extends_another_has_its_keys_over_the_others() {
    let folder = recipes(&[
        ("base.toml", RECIPE),
        ("child.toml", "extends = \"base.toml\"\nseed = 8\n[memory]\ncorrection = false\n[stage.2]\nsteps = 70\nlr = 1e-3"),
        ("grandchild.toml", "extends = \"child.toml\"\nstages = 1\n[memory]\nkind = \"rmt\"\ntokens = 8"),
        ("other.toml", "extends = \"base.toml\"\n[[stage]]\npairs = 5\nbatch = 2\nsteps = 3"),
        ("heads.toml", "extends = \"base.toml\"\n[model]\nheads = 2"),
        ("mamba.toml", "extends = \"heads.toml\"\n[model]\nkind = \"mamba\"\nstate = 8\n[memory]\nkind = \"none\""),
    ]);
    let load = |name: &str| Recipe::load(&folder.path().join(name), &[]).unwrap();
    let (base, child) = (load("base.toml"), load("child.toml"));
    assert_eq!((child.seed, child.stages.len(), child.stages[1].steps, child.stages[1].lr), (8, 2, 70, Some(1e-3)));
    assert_eq!(format!("{:?}", child.stages[0]), format!("{:?}", base.stages[0]));
    let memory = child.memory.as_ref().unwrap().whole().unwrap().get::<Associative>().unwrap();
    assert!(!memory.correction && memory.d_mem == 32);
    let grandchild = load("grandchild.toml");
    assert_eq!((grandchild.seed, grandchild.stages.len()), (8, 1));
    assert!(
        grandchild.memory.as_ref().unwrap().whole().unwrap().get::<Rmt>().unwrap().tokens == 8,
        "another kind takes nothing of the other's section"
    );
    load("mamba.toml"); // which knows no heads
    let other = load("other.toml");
    let pairs = (0..2).map(|i| other.lessons_of::<RetrievalLessons>().unwrap().stage(i).map(|(_, pairs)| pairs));
    assert_eq!(pairs.collect::<Vec<_>>(), [Some(5), None]);
    let changed = Recipe::load(&folder.path().join("child.toml"), &["stage.2.steps=9".into()]).unwrap();
    assert_eq!(changed.stages[1].steps, 9);
}

#[test]
fn mistakes_are_named_with_the_file_that_they_are_in() {
    let folder = recipes(&[
        ("base.toml", &format!("{RECIPE}questions = 0")),
        ("good.toml", RECIPE),
        ("child.toml", "extends = \"base.toml\"\nseed = 8"),
        ("typo.toml", "extends = \"good.toml\"\n[optimizer]\nlearning_rate = 1"),
        ("type.toml", "extends = \"good.toml\"\n\n[stage.2]\nbatch = \"many\""),
        ("small.toml", "extends = \"good.toml\"\n[stage.2]\nbatch = 0"),
        ("stage.toml", "extends = \"good.toml\"\n\n[stage.3]\nbatch = 1"),
        ("gone.toml", "\nextends = \"nothing.toml\""),
        ("ring.toml", "extends = \"ring.toml\""),
        ("number.toml", "extends = 3"),
        ("broken.toml", "seed = 1\nseed ="),
    ]);
    for (name, parts) in [
        ("child.toml", &["base.toml: stage 2 (line 13)", "questions"][..]),
        ("typo.toml", &["typo.toml: optimizer.learning_rate (line 3)", "unknown field"]),
        ("type.toml", &["type.toml: stage.2.batch (line 4)", "many"]),
        ("small.toml", &["small.toml: stage 2 (line 2)", "batch: expected at least 1"]),
        ("stage.toml", &["stage.toml: stage.3 (line 3)", "one of the 2 stages"]),
        ("gone.toml", &["gone.toml: extends (line 2)", "nothing.toml"]),
        ("ring.toml", &["ring.toml: extends (line 1)", "end somewhere"]),
        ("number.toml", &["number.toml: extends (line 1)", "the name of a recipe", "got 3"]),
        ("broken.toml", &["broken.toml: line 2"]),
        ("missing.toml", &["missing.toml"]),
    ] {
        let said = Recipe::load(&folder.path().join(name), &[]).unwrap_err().to_string();
        assert!(parts.iter().all(|part| said.contains(part)), "{name}: {said}");
    }
    assert!(matches!(Recipe::load(&folder.path().join("typo.toml"), &[]), Err(Error::Recipe { line: Some(3), .. })));
    refused("extends = \"base.toml\"", &["extends"]);
}

/// Recipes as they were first written, which runs in folders of users begin from.
#[test]
fn recipes_of_the_first_form_are_still_read() {
    let old = r#"
[task]
setting = "babilong"
question = "qa2"
[memory]
kind = "associative"
tokens = 4
d_mem = 16
[[stage]]
segment = 16
segments = 2
batch = 8
steps = 10
until = 2.0
"#;
    let r = Recipe::parse(old, &[]).unwrap();
    assert_eq!((stories(&r), r.stages[0].until), (vec![Task::new(2).unwrap()], Until::Never));
    assert!(Recipe::parse(old, &["task.question=qa9".into()]).is_err());
}

#[test]
fn how_the_memory_of_another_model_is_written_may_be_all_that_is_said_of_it() {
    let body = &RECIPE[RECIPE.find("[[stage]]").unwrap()..];
    let with = |model: &str, memory: &str| format!("[task]\nsetting = \"remember\"\n[model]\n{model}\n[memory]\n{memory}\n{body}");
    let recipe = Recipe::parse(&with("from = \"folder\"", "write = \"projected\""), &[]).unwrap();
    let memory = recipe.memory.as_ref().unwrap();
    let over = |own: MemoryConfig| memory.over(&own, "folder").map(|m| m.keys());
    let paper = MemoryConfig::new(Associative::new(4, 32));
    let mut want = paper.keys();
    want.insert("write".into(), json!("projected"));
    assert_eq!(over(paper).unwrap(), want.clone());
    assert_eq!(recipe.record().unwrap()["memory.write"], "projected");

    // A memory that is told whole changes the way only where it names one.
    let whole = MemoryRecipe::Whole(MemoryConfig::new(Associative::new(4, 32)));
    let projected = MemoryConfig::from_keys(want).unwrap();
    let error = whole.over(&projected, "folder").unwrap_err().to_string();
    assert!(error.contains("memory.write: expected \"projected\", as the model in folder has"), "{error}");
    let other = MemoryRecipe::Whole(projected.clone()).over(&MemoryConfig::new(Associative::new(4, 32)), "folder");
    assert_eq!(other.unwrap(), projected);

    let error = over(MemoryConfig::new(Rmt { tokens: 2, wrap_pos: false })).unwrap_err().to_string();
    assert!(error.contains("memory.write") && error.contains("the model in folder is of kind rmt"), "{error}");
    refused(&with("", "write = \"projected\""), &["memory.kind: expected a kind of memory, where no model.from has one"]);
    refused(&with("from = \"folder\"", "write = \"backwards\""), &["memory", "backwards"]);
    refused(&with("from = \"folder\"", "tokens = 3"), &["memory", "kind"]);
}

#[test]
fn rows_that_python_wrote_are_the_same_wherever_they_lie() {
    let record = |rows: &str| {
        let text = "[task]\nsetting = \"qa\"\n[memory]\nkind = \"associative\"\ntokens = 4\nd_mem = 32\n[[stage]]\nsegment = 8\nsegments = 2\nbatch = 2\nsteps = 2";
        Recipe::parse(text, &[format!("task.train=[\"{rows}\"]")]).unwrap().record().unwrap()
    };
    assert_eq!(record("/tmp/a/armt-rows-0f.jsonl"), record("b/armt-rows-0f.jsonl"));
    assert_ne!(record("/tmp/a/armt-rows-0f.jsonl"), record("/tmp/a/armt-rows-1f.jsonl"));
    assert_ne!(record("/tmp/a/rows.jsonl"), record("/tmp/b/rows.jsonl"));
}
