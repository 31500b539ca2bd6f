"""Texts in, memories out."""

import os
import signal
import threading
import time

import armt
import pytest
from conftest import STORY


def test_a_memory_is_to_the_bit_that_of_the_command_line(model, book, cli, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text(book, encoding="utf-8", newline="")
    cli("read", "babilong-qa1", text, "--memory", tmp_path / "book.mem", "--device", "cpu")
    theirs = (tmp_path / "book.mem").read_bytes()
    assert model.read(text).to_bytes() == theirs
    assert model.read(book).to_bytes() == theirs
    assert model.read(book[i : i + 777] for i in range(0, len(book), 777)).to_bytes() == theirs


def test_int8_is_the_command_lines_and_either_model_asks_its_memory(model, book, cli, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text(book + STORY, encoding="utf-8", newline="")
    rounded = armt.Model.from_pretrained("babilong-qa1", device="cpu", dtype="int8")
    assert (rounded.dtype, model.dtype) == ("int8", "f32") and rounded.fingerprint == model.fingerprint
    cli("read", "babilong-qa1", text, "--memory", tmp_path / "book.mem", "--device", "cpu", "--dtype", "int8")
    memory = rounded.read(text)
    assert memory.to_bytes() == (tmp_path / "book.mem").read_bytes() != model.read(text).to_bytes()
    assert str(model.ask(memory, "Where is Mary?")) == str(rounded.ask(memory, "Where is Mary?")) == str(model.ask(model.read(text), "Where is Mary?"))


def test_texts_read_one_after_the_other_are_one_text(model, book):
    whole = model.read(book)
    first = model.read(book[:50_001])
    kept = first.to_bytes()
    assert model.read(book[50_001:], first) == whole
    assert first.to_bytes() == kept, "a memory never changes"
    apart = model.read(book[50_001:], first, new_document=True)
    assert apart != whole and apart.tokens_read >= whole.tokens_read - 2


def test_texts_of_unequal_length_are_read_side_by_side(model, book):
    texts = [book[:n] for n in (10, 40_000, 333, 120_000, 7_001)]
    alone = [model.read(text) for text in texts]
    assert model.read_batch(texts, batch_size=3) == alone
    both = [model.read(STORY), None, None, model.read(STORY), None]
    appended = model.read_batch(texts, both)
    assert appended[0] == model.read(texts[0], both[0]) and appended[1] == alone[1] and appended[3] == model.read(texts[3], both[3])


def test_many_texts_of_one_command_are_those_read_alone(model, book, cli, tmp_path):
    (tmp_path / "texts/sub").mkdir(parents=True)
    texts = {f"{n}.txt": book[: 10 + 1_700 * n] for n in range(20)} | {"sub/0.txt": STORY}
    for name, text in texts.items():
        (tmp_path / "texts" / name).write_text(text, encoding="utf-8", newline="")
    said = cli("read", "babilong-qa1", tmp_path / "texts", "--each", tmp_path / "out", "--batch", 8, "--device", "cpu")
    assert "21 of 21 texts read" in said
    for name, text in texts.items():
        assert (tmp_path / "out" / f"{name}.mem").read_bytes() == model.read(text).to_bytes(), name
    (tmp_path / "out/3.txt.mem").unlink()
    said = cli("read", "babilong-qa1", tmp_path / "texts", "--each", tmp_path / "out", "--device", "cpu")
    assert "1 of 21 texts read, 20 were read before" in said
    assert (tmp_path / "out/3.txt.mem").read_bytes() == model.read(texts["3.txt"]).to_bytes()


def test_progress_is_told_after_every_group(model, book):
    heard = []
    memory = model.read(book, progress=heard.append)
    assert len(heard) > 1 and heard == sorted(heard) and heard[-1] <= memory.tokens_read
    heard.clear()
    again = model.read(book[:100_000], memory, progress=heard.append)
    assert heard and heard[-1] <= again.tokens_read - memory.tokens_read + 512, "of this reading, not of those before"
    model.read_batch([book, book[:60_000], book[:50_000]], batch_size=2, progress=heard.append)
    assert heard


def test_what_a_callback_or_an_iterator_raises_comes_out(model, book):
    with pytest.raises(ZeroDivisionError):
        model.read(book, progress=lambda tokens: 1 / 0)

    def pieces():
        yield book[:1000]
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        model.read(pieces())
    with pytest.raises(TypeError):
        model.read(iter(["a", 3]))


def test_ctrl_c_ends_a_reading_between_groups(model, book):
    def press(delay):
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, args=(0.3,)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        model.read(book for _ in range(10_000))
    assert time.monotonic() - started < 5


def test_errors_have_the_words_of_the_command_line(model, tmp_path):
    with pytest.raises(armt.NotFoundError, match="No such file") as error:
        model.read(tmp_path / "nothing.txt")
    assert isinstance(error.value, (armt.Error, FileNotFoundError))
    with pytest.raises(armt.NotFoundError, match="there is no such folder; expected a model folder"):
        armt.Model.from_pretrained(tmp_path / "nothing")
    with pytest.raises(armt.FileError, match="it is empty: there is nothing to read"):
        model.read("")
    with pytest.raises(TypeError, match="expected a str"):
        model.read(b"bytes")
    with pytest.raises(armt.InputError, match="expected device auto, cpu, cuda or cuda:N, got tpu"):
        armt.Model.from_pretrained("babilong-qa1", device="tpu")
    with pytest.raises(armt.InputError, match="bf16 needs a GPU"):
        armt.Model.from_pretrained("babilong-qa1", device="cpu", dtype="bf16")


def test_a_gguf_file_is_a_model_without_a_memory():
    from conftest import ROOT

    model = armt.Model.from_pretrained(ROOT / "tests/fixtures/gguf/llama-q8.gguf", device="cpu")
    assert model.generate("Hello", max_tokens=3).tokens
    with pytest.raises(armt.Error, match="the model has no memory"):
        model.read("A text.")
