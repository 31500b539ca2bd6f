"""Many documents on Ray: a dataset of texts or paths in, a dataset of memories out, questions against them.

    import ray
    from armt.ray import ask_all, read_all

    documents = ray.data.read_json("documents.jsonl")                      # id, text (or path)
    read_all(documents, "babilong-qa1", workers=4, state="progress/").write_parquet("memories/")
    asked = ask_all(ray.data.read_parquet("memories/"), "babilong-qa1", question="Where is Mary?")

A worker is an actor with the model in it, which reads the texts of a batch side by side. With a `state` folder, which all workers must see, every
memory that was finished is kept there, and of a long text the memory so far every `every` characters: a worker that dies is started anew by Ray and
goes on from there, and so does a whole job that is given again. What is kept belongs to a row's id and to what it holds: a text that has changed is read
anew. Memories are, on the CPU to the bit, those of `armt read`, but for files that end within a character. A document that cannot be read has an empty
memory, and the reason in `error`; the others are read all the same.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import Memory, Model, set_threads
from .errors import Error, InputError, MemoryFileError, NotFoundError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from ray.data import Dataset as _Dataset

# Of a file, read at a time.
_BLOCK = 1 << 20
# Of a file, at its beginning: what has a zero byte there is no text.
_HEAD = 1 << 13


def read_all(
    documents: _Dataset,
    model: str | os.PathLike[str],
    *,
    workers: int = 1,
    cpus: float = 1,
    gpus: float = 0,
    batch_size: int = 16,
    text: str = "text",
    path: str = "path",
    id: str = "id",
    state: str | os.PathLike[str] | None = None,
    every: int = 1 << 22,
    device: str | None = None,
    dtype: str | None = None,
) -> _Dataset:
    """Reads every document into a memory. Rows come back without the column `text`, and with `memory` (the bytes of its file, as
    `Memory.from_bytes` takes them), `tokens_read`, `seconds`, its share of the time that its batch was read in, and `error`: empty, or why a
    document could not be read, whose memory is empty then.

    A row has its text in the column `text`, or the path of a file in UTF-8 in the column `path`. Rows are told apart by the column `id`, where
    there is one, or else by what they hold. Each of `workers` actors has `cpus` cores (as many threads compute) and `gpus` GPUs. Ray itself needs
    a core besides: where actors take all that the cluster has, nothing is read.
    """
    device = device or ("cuda" if gpus else "cpu")
    settings = {
        "model": _place(model), "batch_size": batch_size, "text": text, "path": path, "id": id, "every": every,
        "state": None if state is None else os.path.abspath(state), "device": device, "dtype": dtype, "threads": max(1, int(cpus)),
    }  # fmt: skip
    return _map(documents, _Reader, settings, batch_size, workers, cpus, gpus)


def ask_all(
    memories: _Dataset,
    model: str | os.PathLike[str],
    *,
    question: str | None = None,
    column: str = "question",
    workers: int = 1,
    cpus: float = 1,
    gpus: float = 0,
    batch_size: int = 64,
    max_tokens: int = 64,
    device: str | None = None,
    dtype: str | None = None,
) -> _Dataset:
    """Asks every memory: the question that is given, or that of its row. Rows come back with `answer` and `probability`; where the memory
    is empty the answer is too, and its probability no number."""
    settings = {
        "model": _place(model), "question": question, "column": column, "max_tokens": max_tokens,
        "device": device or ("cuda" if gpus else "cpu"), "dtype": dtype, "threads": max(1, int(cpus)),
    }  # fmt: skip
    return _map(memories, _Asker, settings, batch_size, workers, cpus, gpus)


def _place(model: str | os.PathLike[str]) -> str:
    """A model for workers, who may be in another folder: a name is the same there, a path must say all."""
    return os.path.abspath(model) if os.path.exists(model) else os.fspath(model)


def _map(
    rows: _Dataset, worker: type, settings: dict[str, Any], batch_size: int, workers: int, cpus: float, gpus: float
) -> _Dataset:
    """Gives batches of rows to actors, which Ray Data starts anew where they die, and gives their batches again."""
    from ray.data import ActorPoolStrategy

    return rows.map_batches(
        worker, fn_constructor_kwargs=settings, batch_size=batch_size, batch_format="numpy",
        compute=ActorPoolStrategy(size=workers), num_cpus=cpus, num_gpus=gpus,
    )  # fmt: skip


class _Asker:
    def __init__(self, model: str, question: str | None, column: str, max_tokens: int, device: str, dtype: str | None, threads: int) -> None:
        set_threads(threads)
        self.model = Model.from_pretrained(model, device=device, dtype=dtype)
        self.question, self.column, self.max_tokens = question, column, max_tokens

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        questions = [self.question] * len(batch["memory"]) if self.question is not None else batch[self.column]
        answers = [
            self.model.ask(Memory.from_bytes(bytes(memory)), _text(question, self.column), max_tokens=self.max_tokens) if memory else None
            for memory, question in zip(batch["memory"], questions)
        ]
        return {
            **batch,
            "answer": _objects(["" if answer is None else str(answer) for answer in answers]),
            "probability": np.array([np.nan if answer is None else answer.probability for answer in answers]),
        }


class _Reader:
    """Reads the documents of batches, going on from what a worker before it has kept."""

    def __init__(
        self, model: str, batch_size: int, text: str, path: str, id: str, every: int, state: str | None, device: str,
        dtype: str | None, threads: int,
    ) -> None:  # fmt: skip
        set_threads(threads)
        self.model = Model.from_pretrained(model, device=device, dtype=dtype)
        self.batch_size, self.every = batch_size, every
        self.text, self.path, self.id = text, path, id
        # Numbers of another type or device are other memories.
        kind = "-".join([self.model.fingerprint[:16], self.model.dtype, self.model.device.split(":")[0]])
        self.kept = None if state is None else _Kept(Path(state) / kind)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        column = self.text if self.text in batch else self.path
        if column not in batch:
            raise InputError(f"expected a column {self.text} or {self.path}, got {', '.join(batch)}")
        ids = batch[self.id] if self.id in batch else [""] * len(batch[column])
        documents = [_Document(value, id, column, column == self.path) for value, id in zip(batch[column], ids)]
        started = time.monotonic()
        memories = self.read(documents)
        share = (time.monotonic() - started) / max(1, len(documents))
        rows = {name: values for name, values in batch.items() if name != self.text}
        return {
            **rows,
            # Never None: a block with nothing else would have columns of another type, and a folder of parquet two schemas.
            "memory": _objects([b"" if memory is None else memory.to_bytes() for memory in memories]),
            "tokens_read": np.array([0 if memory is None else memory.tokens_read for memory in memories], dtype=np.int64),
            "seconds": np.full(len(memories), share),
            "error": _objects([document.error or "" for document in documents]),
        }

    def read(self, documents: list[_Document]) -> list[Memory | None]:
        """The memories of documents: all go on side by side, `every` characters at a time, until each has ended or cannot be read."""
        memories: list[Memory | None] = [None] * len(documents)
        going: dict[int, Iterator[str]] = {}
        for n, document in enumerate(documents):
            with document.trying():
                document.open()
                memories[n], at = self.kept.find(document.name) if self.kept is not None else (None, 0)
                if at is not None:
                    going[n] = document.pieces(at, self.every)
        while going:
            more: dict[int, str] = {}
            for n, pieces in list(going.items()):
                document = documents[n]
                with document.trying():
                    piece = next(pieces, None)
                    if piece is not None:
                        more[n] = piece
                        continue
                    memory = memories[n]
                    if memory is None:
                        raise InputError(f"expected a text, got an empty one: {document.told}")
                    if self.kept is not None:
                        self.kept.keep(document.name, memory, None)
                del going[n]
            for n, after in self.read_more(more, memories, documents).items():
                memories[n] = after
                documents[n].at += len(more[n])
                if self.kept is not None and documents[n].at % self.every == 0:
                    self.kept.keep(documents[n].name, after, documents[n].at)
            for n, document in enumerate(documents):
                if document.error is not None:
                    going.pop(n, None)
        return [None if document.error is not None else memory for document, memory in zip(documents, memories)]

    def read_more(self, more: dict[int, str], memories: list[Memory | None], documents: list[_Document]) -> dict[int, Memory]:
        """Texts side by side; where that fails each alone, so that what is wrong with one is not the others' fault."""
        if not more:
            return {}
        try:
            read = self.model.read_batch(list(more.values()), [memories[n] for n in more], batch_size=self.batch_size)
            return dict(zip(more, read))
        except Error:
            alone = {}
            for n, text in more.items():
                with documents[n].trying():
                    alone[n] = self.model.read(text, memories[n])
            return alone


class _Document:
    """A text, or the path of one, and why it could not be read."""

    def __init__(self, value: object, id: object, column: str, is_path: bool) -> None:
        self.value, self.id, self.column, self.is_path = value, id, column, is_path
        self.told = str(id) if isinstance(id, str) and id else repr(value)[:80]
        self.name, self.text = "", ""
        self.at = 0
        self.error: str | None = None

    @contextmanager
    def trying(self) -> Iterator[None]:
        try:
            yield
        except (Error, OSError) as error:
            self.error = str(error)

    def open(self) -> None:
        """Looks whether it is a text, and names it by its id and by what it holds."""
        if self.id is None:
            raise InputError(f"expected an id, got None, of the row with {self.column} {self.value!r:.80}")
        self.text = _text(self.value, self.column)
        held = self.text
        if self.is_path:
            with open(self.text, "rb") as file:
                if b"\0" in file.read(_HEAD):
                    raise InputError(f"{self.text}: expected a text in UTF-8, got zero bytes")
                found = os.fstat(file.fileno())
            held = f"{os.path.abspath(self.text)}\n{found.st_size}\n{found.st_mtime_ns}"
        digest = hashlib.blake2b(digest_size=16)
        for part in (str(self.id), held):
            digest.update(hashlib.blake2b(part.encode(errors="surrogatepass")).digest())
        self.name = digest.hexdigest()

    def pieces(self, at: int, every: int) -> Iterator[str]:
        """The text from a character on, in pieces of `every` characters."""
        self.at = at
        if not self.is_path:
            for begin in range(at, len(self.text), every):
                yield self.text[begin : begin + every]
            return
        # What is no UTF-8 is read as U+FFFD, as `armt read` does, and lines end as they do in the file.
        with open(self.text, encoding="utf-8", errors="replace", newline="") as file:
            left = at
            while left > 0 and (passed := file.read(min(left, _BLOCK))):
                left -= len(passed)
            while piece := file.read(every):
                yield piece


class _Kept:
    """Memories that were finished, and those of texts that were not: NAME.mem, and NAME.CHARACTERS.part, of one model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)

    def find(self, name: str) -> tuple[Memory | None, int | None]:
        """The memory of a text and the characters of it that are in it, None where it is finished."""
        parts = sorted(((_characters(part), part) for part in self.folder.glob(f"{name}.*.part")), reverse=True)
        for at, file in [(None, self.folder / f"{name}.mem"), *parts]:
            try:
                return Memory.load(file), at
            except MemoryFileError:
                file.unlink(missing_ok=True)
            except NotFoundError:
                # There is none, or another worker, with the same text, has come further meanwhile.
                continue
        return None, 0

    def keep(self, name: str, memory: Memory, at: int | None) -> None:
        before = list(self.folder.glob(f"{name}.*.part"))
        memory.save(self.folder / (f"{name}.mem" if at is None else f"{name}.{at}.part"))
        for part in before:
            if at is None or _characters(part) != at:
                part.unlink(missing_ok=True)


def _text(value: object, column: str) -> str:
    """A text of a column. What is none would be read as Python writes it."""
    if not isinstance(value, str):
        raise InputError(f"expected a str in the column {column}, got {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"expected whole characters in the column {column}, got {value[error.start]!r} at {error.start}") from None
    return str(value)


def _objects(values: list[Any]) -> NDArray[np.object_]:
    """A column of values as they are: numpy would cut zeros off the end of bytes."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _characters(part: Path) -> int:
    return int(part.name.split(".")[-2])
