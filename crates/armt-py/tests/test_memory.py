"""Memories are values."""

import copy
import pickle

import armt
import numpy as np
import pytest
from conftest import STORY


@pytest.fixture(scope="module")
def memory(model, book):
    return model.read(book)


def test_a_memory_goes_through_files_bytes_and_pickle(model, memory, tmp_path):
    memory.save(tmp_path / "a.mem")
    same = [armt.Memory.load(tmp_path / "a.mem"), armt.Memory.from_bytes(bytes(memory)), copy.deepcopy(memory)]
    same += [pickle.loads(pickle.dumps(memory, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    assert all(other == memory and hash(other) == hash(memory) for other in same)
    assert model.read("more", memory) != memory and memory != "memory"
    assert {memory: 1}[same[0]] == 1


def test_the_command_line_asks_a_saved_memory(model, cli, tmp_path):
    memory = model.read(STORY)
    memory.save(tmp_path / "a.mem")
    assert cli("ask", "babilong-qa1", "--memory", tmp_path / "a.mem", "Where is Mary?", "--device", "cpu").strip() == "kitchen"


def test_arrays_are_views_of_the_bytes(memory):
    assert set(memory.arrays()) == {"A", "z"}
    assert memory.A.shape == (2, 1, 192, 64) and memory.z.shape == (2, 1, 192)
    assert memory.A.dtype == np.float32 and np.isfinite(memory.A).all() and np.abs(memory.A).max() > 0
    assert not memory.A.flags.writeable and not memory.A.flags.owndata
    assert memory.A.tobytes() in memory.to_bytes()
    with pytest.raises(ValueError):
        memory.A[0] = 0


def test_what_was_read_is_told(model, memory, book):
    assert memory.tokens_read == pytest.approx(len(model.encode(book)), abs=3)
    assert memory.segments_read == (memory.tokens_read - memory.open_tokens) // model.segment_size
    assert memory.kind == "associative" and memory.model_name == "babilong-qa1" and memory.fingerprint == model.fingerprint
    assert memory.nbytes == len(memory.to_bytes()) and "tokens_read=" in repr(memory)


def test_damaged_and_foreign_memories_are_refused(model, memory, tmp_path):
    data = bytearray(memory.to_bytes())
    data[-5] ^= 1
    with pytest.raises(armt.MemoryFileError, match="damaged"):
        armt.Memory.from_bytes(bytes(data))
    (tmp_path / "bad.mem").write_bytes(data[:100])
    with pytest.raises(armt.MemoryFileError, match="bad.mem"):
        armt.Memory.load(tmp_path / "bad.mem")
    with pytest.raises(armt.MemoryFileError, match="the memory of another model, babilong-qa1"):
        armt.Model.from_pretrained("books", device="cpu").ask(memory, "Who?")
