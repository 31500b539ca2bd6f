"""Many documents on Ray: real actors, one of which is killed."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import armt
import pytest
from conftest import STORY

ray = pytest.importorskip("ray")
DOCUMENTS = 1000


@pytest.fixture(scope="module", autouse=True)
def cluster():
    # Two for actors that read, whatever the machine has, and two for what goes in and comes out.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def documents(book):
    """Texts of very unequal length, with a fact in each."""
    draw = random.Random(1)
    rooms = ["kitchen", "garden", "office", "bathroom"]
    rows = []
    for number in range(DOCUMENTS):
        room, begin = draw.choice(rooms), draw.randrange(60_000)
        length = int(10 ** draw.uniform(1, 4.6))
        rows.append({"id": f"{number}", "text": f"Mary went to the {room}. {book[begin : begin + length]}", "room": room})
    return rows


def workers():
    """Processes of actors that read."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if b"_Reader" in title and b"ray::" in title:
            found.append(int(process.name))
    return found


def test_a_thousand_documents_are_read_to_the_bit_though_an_actor_is_killed(model, documents, cli, tmp_path):
    from armt.ray import ask_all, read_all

    state, killed, ended = tmp_path / "state", [], threading.Event()

    def kill():
        while not killed and not ended.is_set():
            if len(list(state.glob("*/*.mem"))) > DOCUMENTS // 10 and (found := workers()):
                os.kill(found[0], signal.SIGKILL)
                killed.append(found[0])
            time.sleep(0.05)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    rows = ray.data.from_items(documents).repartition(50)
    read_all(rows, "babilong-qa1", workers=2, state=state, every=8_000).write_parquet(str(tmp_path / "memories"))
    ended.set()
    killer.join()
    assert killed, "an actor was killed on the way"
    read = {row["id"]: row for row in ray.data.read_parquet(str(tmp_path / "memories")).take_all()}
    assert len(read) == DOCUMENTS
    (tmp_path / "texts").mkdir()
    for document in documents:
        (tmp_path / "texts" / document["id"]).write_text(document["text"], encoding="utf-8", newline="")
    cli("read", "babilong-qa1", tmp_path / "texts", "--each", tmp_path / "theirs", "--device", "cpu")
    for document in documents:
        expected = armt.Memory.load(tmp_path / "theirs" / f"{document['id']}.mem")
        row = read[document["id"]]
        assert row["memory"] == expected.to_bytes(), document["id"]
        assert row["tokens_read"] == expected.tokens_read and "text" not in row

    some = ray.data.read_parquet(str(tmp_path / "memories")).limit(40)
    asked = ask_all(some, "babilong-qa1", question="Where is Mary?", max_tokens=4).take_all()
    assert len(asked) == 40
    for row in asked:
        assert row["answer"] == model.ask(armt.Memory.from_bytes(row["memory"]), "Where is Mary?", max_tokens=4)
    assert sum(row["answer"] == row["room"] for row in asked) >= 30


def test_a_job_that_is_given_again_reads_nothing_twice(model, documents, tmp_path):
    from armt.ray import read_all

    (tmp_path / "texts").mkdir()
    rows = []
    for number, document in enumerate(documents[:30]):
        path = tmp_path / "texts" / f"{number}.txt"
        path.write_text(document["text"], encoding="utf-8", newline="")
        rows.append({"path": str(path)})
    first = read_all(ray.data.from_items(rows), "babilong-qa1", state=tmp_path / "state", every=5_000).take_all()
    kept = sorted((tmp_path / "state").glob("*/*"))
    assert len(kept) == 30 and {path.suffix for path in kept} == {".mem"}
    changed = {path: path.stat().st_mtime_ns for path in kept}
    again = read_all(ray.data.from_items(rows), "babilong-qa1", state=tmp_path / "state", every=5_000).take_all()
    assert {row["path"]: row["memory"] for row in again} == {row["path"]: row["memory"] for row in first}
    assert {path: path.stat().st_mtime_ns for path in kept} == changed
    for row in first:
        assert row["memory"] == model.read(Path(row["path"])).to_bytes()


def test_files_of_documents_that_cannot_be_read_have_the_columns_of_the_others(tmp_path):
    from armt.ray import ask_all, read_all

    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"id": f"{n}", "text": STORY if n % 6 > 3 else ""} for n in range(12)]
    memories, answers = str(tmp_path / "memories"), str(tmp_path / "answers")
    read_all(ray.data.from_items(rows).repartition(6), "babilong-qa1", batch_size=2).write_parquet(memories)
    ask_all(ray.data.read_parquet(memories), "babilong-qa1", question="Where is Mary?", batch_size=2).write_parquet(answers)
    for folder in (memories, answers):
        assert len({str(parquet.read_schema(file).remove_metadata()) for file in Path(folder).glob("*.parquet")}) == 1
    read = parquet.read_table(answers).to_pylist()
    assert {(row["answer"], row["memory"] != b"", "empty" in row["error"]) for row in read} == {("kitchen", True, False), ("", False, True)}


def test_models_and_memories_are_objects_of_ray(model):
    memory = model.read(STORY)

    @ray.remote(num_cpus=1)
    def ask(model, memory):
        return model.ask(memory, "Where is Mary?")

    assert ray.get(ask.remote(model, memory)) == "kitchen"
