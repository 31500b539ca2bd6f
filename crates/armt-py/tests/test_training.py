"""Training by a recipe, from Python."""

import json
import os
import signal
from pathlib import Path

import armt
import numpy as np
import pytest
from conftest import ROOT, losses, weights

RECIPE = {
    "seed": 1,
    "task": {"setting": "remember", "symbols": 8},
    "model": {"layers": 2, "width": 32, "heads": 2, "inner": 64},
    "memory": {"kind": "associative", "tokens": 2, "d_mem": 8},
    "eval": {"every": 10, "samples": 20, "batch": 20},
    "stage": [{"pairs": 3, "batch": 8, "steps": 20, "until": "never"}],
}


def test_a_run_is_that_of_the_command_line(cli, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'seed = 1\n[task]\nsetting = "remember"\nsymbols = 8\n[model]\nlayers = 2\nwidth = 32\nheads = 2\ninner = 64\n'
        '[memory]\nkind = "associative"\ntokens = 2\nd_mem = 8\n[eval]\nevery = 10\nsamples = 20\nbatch = 20\n'
        '[[stage]]\npairs = 3\nbatch = 8\nsteps = 20\nuntil = "never"\n'
    )
    cli("train", recipe, "--out", tmp_path / "theirs", "--device", "cpu")
    heard = []
    measured = armt.Trainer(RECIPE, tmp_path / "dict", callbacks=[heard.append], device="cpu").fit()
    assert 0 <= measured["exact_match"] <= 1
    assert [r["step"] for r in heard if r["event"] == "step"] == list(range(1, 21))
    assert [r["step"] for r in heard if r["event"] == "validation"] == [10, 20]
    armt.Trainer(recipe, tmp_path / "file", device="cpu").fit()
    for name in ("dict", "file"):
        assert weights(tmp_path / name / "last") == weights(tmp_path / "theirs/last")
        assert losses(tmp_path / name) == losses(tmp_path / "theirs")


def test_a_run_that_was_stopped_goes_on_to_the_same_numbers(tmp_path):
    armt.Trainer(RECIPE, tmp_path / "whole", device="cpu").fit()
    assert armt.Trainer(RECIPE, tmp_path / "cut", max_steps=7, device="cpu").fit() is None
    assert armt.Trainer(RECIPE, tmp_path / "cut", callbacks=[lambda r: r["total"] < 13], resume=True, device="cpu").fit() is None
    assert armt.Trainer(RECIPE, tmp_path / "cut", resume=True, device="cpu").fit() is not None
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert weights(tmp_path / "cut/last") == weights(tmp_path / "whole/last")


def test_ctrl_c_saves_a_run(tmp_path):
    def press(record):
        if record["total"] == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        armt.Trainer(RECIPE, tmp_path / "run", callbacks=[press], device="cpu").fit()
    assert json.loads((tmp_path / "run/last/state.json").read_text())["total"] == 5


def test_a_callbacks_error_comes_out(tmp_path):
    with pytest.raises(ZeroDivisionError):
        armt.Trainer(RECIPE, tmp_path / "run", callbacks=[lambda r: 1 / 0], device="cpu").fit()


def test_mistakes_in_recipes_are_named(tmp_path):
    with pytest.raises(armt.InputError, match="task.setting"):
        armt.Trainer(RECIPE | {"task": {"setting": "nothing"}}, tmp_path)
    with pytest.raises(armt.InputError, match="lr2"):
        armt.Trainer(RECIPE, tmp_path, changes={"optimizer.lr2": 1})
    with pytest.raises(armt.NotFoundError, match="no such recipe"):
        armt.Trainer("nothing", tmp_path)
    assert armt.Trainer("remember-armt", tmp_path, changes={"seed": 7}).recipe.record()["seed"] == "7"


def test_rows_of_ones_own_are_learned_from(tmp_path):
    rows = [
        {"context": f"{who} went to the {room}. It was late.", "question": f"Where is {who}?", "answer": room}
        for who in ("Mary", "John", "Anna")
        for room in ("kitchen", "garden")
    ]
    dataset = armt.Dataset.from_hf(iter(rows))
    assert len(dataset) == 6 and list(dataset) == rows and list(armt.Dataset.from_jsonl(dataset.path)) == rows
    recipe = RECIPE | {
        "task": {"setting": "qa", "train": [], "bpe": str(ROOT / "data/books-bpe")},
        "stage": [{"segment": 32, "segments": 3, "batch": 4, "steps": 3}],
        "eval": {"every": 3, "samples": 4, "batch": 4},
    }
    measured = armt.Trainer(recipe, tmp_path / "run", train=dataset, valid=dataset, device="cpu").fit()
    assert "exact_match" in measured
    model = armt.Model.from_pretrained(tmp_path / "run", device="cpu")
    assert isinstance(model.ask(model.read(rows[0]["context"]), rows[0]["question"], max_tokens=2), str)
    with pytest.raises(armt.InputError):
        armt.Dataset.from_rows([])


def test_a_run_goes_on_with_the_same_rows_made_anew(tmp_path):
    rows = [{"context": f"Mary went to the {room}.", "question": "Where is Mary?", "answer": room} for room in ("kitchen", "garden")]
    recipe = RECIPE | {
        "task": {"setting": "qa", "train": [], "bpe": str(ROOT / "data/books-bpe")},
        "stage": [{"segment": 32, "segments": 2, "batch": 2, "steps": 4}],
        "eval": {"every": 4, "samples": 2, "batch": 2},
    }

    def fit(out, rows, **options):
        return armt.Trainer(recipe, tmp_path / out, train=armt.Dataset.from_rows(rows), device="cpu", **options).fit()

    fit("whole", rows)
    assert fit("cut", rows, max_steps=2) is None
    with pytest.raises(armt.InputError, match="task.train.1: expected armt-rows-"):
        fit("cut", rows[:1], resume=True)
    assert fit("cut", rows, resume=True) is not None
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_a_hugging_face_dataset_gives_its_rows():
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"Row {n}."} for n in range(5)]
    theirs = datasets.Dataset.from_list(rows)
    assert list(armt.Dataset.from_hf(theirs)) == rows
    assert list(armt.Dataset.from_hf(theirs.to_iterable_dataset())) == rows


def test_babilong_rows_are_those_of_the_command_line(cli, tmp_path):
    dataset = armt.Dataset.babilong("qa1", "1k", samples=3, seed=5)
    out = tmp_path / "theirs.jsonl"
    cli("data", "babilong", "--questions", "qa1", "--lengths", "1k", "--samples", 3, "--seed", 5, "--out", out)
    assert dataset.path.read_bytes() == out.read_bytes() and [row["task"] for row in dataset] == ["qa1"] * 3


def test_what_python_has_for_a_recipe_is_taken_as_it_is_meant(tmp_path):
    from armt.training import _toml

    changes = {"optimizer.lr": np.float32(0.5), "model.from": Path("a/\N{GRINNING FACE}"), "task.train": ["x\ty", "\N{GRINNING FACE}"], "n": np.int64(3)}
    told = {key: _toml(key, value) for key, value in changes.items()}
    assert told == {"optimizer.lr": "0.5", "model.from": '"a/\N{GRINNING FACE}"', "task.train": '["x\\ty", "\N{GRINNING FACE}"]', "n": "3"}
    assert _toml("train.lora", {"rank": 8, "targets": ["q"]}) == '{"rank" = 8, "targets" = ["q"]}'
    for wrong in (None, float("nan"), object()):
        with pytest.raises(armt.InputError, match="optimizer.lr"):
            armt.Trainer(RECIPE, tmp_path / "run", changes={"optimizer.lr": wrong})
        with pytest.raises(armt.InputError, match="optimizer.lr"):
            armt.Trainer(RECIPE | {"optimizer": {"lr": wrong}}, tmp_path / "run")


def test_a_callback_may_answer_with_a_bool_of_numpy(tmp_path):
    steps = []

    def three(record):
        steps.append(record)
        return np.float64(record["total"]) < 3

    assert armt.Trainer(RECIPE, tmp_path / "run", callbacks=[three], device="cpu").fit() is None
    assert [record["total"] for record in steps if record["event"] == "step"] == [1, 2, 3]
