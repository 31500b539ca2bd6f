"""The worker of armt.ray by itself, without Ray: what is kept belongs to a text, and what is wrong with one document is not the others' fault."""

import gzip

import armt
import numpy as np
import pytest
from armt.ray import _Asker, _Document, _place, _Reader
from conftest import STORY

TEXTS = [STORY, f"{STORY} Mary moved to the office.", "Sandra went to the hallway. " * 40]


def reader(state=None, **settings):
    usual = {"model": "babilong-qa1", "batch_size": 4, "text": "text", "path": "path", "id": "id", "every": 300, "device": "cpu", "dtype": None, "threads": armt.get_threads()}
    return _Reader(**usual | settings, state=None if state is None else str(state))


def column(*values):
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def test_one_bad_document_leaves_the_others_as_they_are(model, tmp_path):
    good, zeros, packed = tmp_path / "good.txt", tmp_path / "zeros.txt", tmp_path / "packed.txt"
    good.write_text(TEXTS[1])
    zeros.write_bytes(b"Mary went\0to the kitchen.")
    packed.write_bytes(gzip.compress(TEXTS[1].encode()))
    (tmp_path / "empty.txt").touch()
    paths = column(str(tmp_path / "missing.txt"), str(good), str(zeros), str(packed), str(tmp_path / "empty.txt"), None)
    for read in (reader(), reader(tmp_path / "state"), reader(tmp_path / "state")):
        rows = read({"path": paths})
        assert [error == "" for error in rows["error"]] == [False, True, False, False, False, False], rows["error"]
        assert rows["memory"][1] == model.read(TEXTS[1]).to_bytes()
        assert all(memory == b"" for n, memory in enumerate(rows["memory"]) if n != 1)
        assert "missing.txt" in rows["error"][0] and "zero bytes" in rows["error"][2] and "empty" in rows["error"][4]
    asker = _Asker("babilong-qa1", "Where is Mary?", "question", 8, "cpu", None, armt.get_threads())
    asked = asker(rows)
    assert list(asked["answer"]) == ["", "office", "", "", "", ""] and np.isnan(asked["probability"]).sum() == 5


@pytest.mark.parametrize("value", [None, 5, b"Mary went.", ["Mary went."]])
def test_what_is_no_text_is_not_read_as_python_writes_it(value):
    rows = reader()({"text": column(TEXTS[0], value)})
    assert rows["error"][0] == "" and "expected a str" in rows["error"][1]


def test_half_a_character_is_not_the_others_fault(model):
    rows = reader()({"text": column(TEXTS[0], "Mary \ud83d went.", TEXTS[1])})
    assert rows["error"][1] == "expected whole characters in the column text, got '\\ud83d' at 5"
    assert [rows["memory"][n] for n in (0, 2)] == [model.read(text).to_bytes() for text in TEXTS[:2]]


def test_what_another_worker_removes_meanwhile_is_looked_for_no_longer(model, tmp_path, monkeypatch):
    kept = reader(tmp_path).kept
    memories = {at: model.read(TEXTS[2][:at]) for at in (300, 600)}
    for at, memory in memories.items():
        memory.save(kept.folder / f"a.{at}.part")
    load = armt.Memory.load

    class Gone:
        @staticmethod
        def load(path):
            if path.name == "a.600.part":
                path.unlink()
            return load(path)

    monkeypatch.setattr("armt.ray.Memory", Gone)
    assert kept.find("a") == (memories[300], 300) and kept.find("b") == (None, 0)


def test_what_is_kept_belongs_to_an_id_and_to_its_text(model, tmp_path):
    expected = [model.read(text).to_bytes() for text in TEXTS]
    for _ in range(2):
        rows = reader(tmp_path, batch_size=1)({"id": column("a", "a", "b"), "text": column(*TEXTS)})
        assert list(rows["memory"]) == expected
    changed = reader(tmp_path)({"id": column("a", "b"), "text": column(TEXTS[2], TEXTS[0])})
    assert list(changed["memory"]) == [expected[2], expected[0]]
    file = tmp_path / "document.txt"
    for text in TEXTS:
        file.write_text(text)
        assert reader(tmp_path)({"path": column(str(file))})["memory"][0] == model.read(text).to_bytes()
    nameless = reader(tmp_path)({"id": column(None, "c"), "text": column(*TEXTS[:2])})
    assert "expected an id" in nameless["error"][0] and nameless["memory"][1] == expected[1]
    other = reader(tmp_path, dtype="int8")({"id": column("a"), "text": column(TEXTS[0])})
    assert len(list(tmp_path.glob("*-f32-cpu"))) == len(list(tmp_path.glob("*-int8-cpu"))) == 1 and other["error"][0] == ""


def test_a_text_that_was_half_read_goes_on_from_its_memory(model, book, tmp_path):
    text, going = book[:20_000], reader(tmp_path, every=6_000)
    document = _Document(text, "half", "text", False)
    document.open()
    going.kept.keep(document.name, model.read(text[:12_000]), 12_000)
    heard, taken = [], document.pieces
    document.pieces = lambda at, every: heard.append(at) or taken(at, every)
    assert going.read([document]) == [model.read(text)] and heard == [12_000]
    assert not list(tmp_path.glob("*/*.part"))


def test_workers_in_other_folders_find_the_model(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert _place("model") == str(tmp_path / "model") and _place("babilong-qa1") == "babilong-qa1"
