"""Many documents on Ray: a dataset of texts or paths in, a dataset of memories out, questions against them.

    import ray
    from armt.ray import ask_all, read_all

    documents = ray.data.read_json("documents.jsonl")                      # id, text (or path)
    read_all(documents, "babilong-qa1", workers=4, state="progress/").write_parquet("memories/")
    asked = ask_all(ray.data.read_parquet("memories/"), "babilong-qa1", question="Where is Mary?")

A worker is an actor with the model in it, which reads the texts of a batch side by side. With a `state` folder, which all workers must see, every
memory that was finished is kept there, and of a long text the memory so far every `every` characters: a worker that dies is started anew by Ray and
goes on from there, and so does a whole job that is given again. Memories are, on the CPU to the bit, those of `armt read`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import Memory, Model, set_threads
from .errors import InputError, MemoryFileError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from ray.data import Dataset as _Dataset

# Of a file, read at a time.
_BLOCK = 1 << 20


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
    `Memory.from_bytes` takes them), `tokens_read`, and `seconds`, its share of the time that its batch was read in.

    A row has its text in the column `text`, or the path of a file in UTF-8 in the column `path`. Rows are told apart by the column `id`, where
    there is one, or else by what they hold. Each of `workers` actors has `cpus` cores (as many threads compute) and `gpus` GPUs. Ray itself needs
    a core besides: where actors take all that the cluster has, nothing is read.
    """
    device = device or ("cuda" if gpus else "cpu")
    settings = {
        "model": os.fspath(model), "batch_size": batch_size, "text": text, "path": path, "id": id, "every": every,
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
    """Asks every memory: the question that is given, or that of its row. Rows come back with `answer` and `probability`."""
    settings = {
        "model": os.fspath(model), "question": question, "column": column, "max_tokens": max_tokens,
        "device": device or ("cuda" if gpus else "cpu"), "dtype": dtype, "threads": max(1, int(cpus)),
    }  # fmt: skip
    return _map(memories, _Asker, settings, batch_size, workers, cpus, gpus)


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
            self.model.ask(Memory.from_bytes(bytes(memory)), str(question), max_tokens=self.max_tokens)
            for memory, question in zip(batch["memory"], questions)
        ]
        return {
            **batch,
            "answer": _objects([str(answer) for answer in answers]),
            "probability": np.array([answer.probability for answer in answers]),
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
        self.kept = None if state is None else _Kept(Path(state), self.model.fingerprint)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        column = self.text if self.text in batch else self.path
        if column not in batch:
            raise InputError(f"expected a column {self.text} or {self.path}, got {', '.join(batch)}")
        documents = [_Document(str(value), column == self.path) for value in batch[column]]
        ids = [str(i) for i in batch[self.id]] if self.id in batch else [document.digest() for document in documents]
        started = time.monotonic()
        memories = self.read(documents, ids)
        share = (time.monotonic() - started) / max(1, len(documents))
        rows = {name: values for name, values in batch.items() if name != self.text}
        return {
            **rows,
            "memory": _objects([memory.to_bytes() for memory in memories]),
            "tokens_read": np.array([memory.tokens_read for memory in memories], dtype=np.int64),
            "seconds": np.full(len(memories), share),
        }

    def read(self, documents: list[_Document], ids: list[str]) -> list[Memory]:
        """The memories of documents: all go on side by side, `every` characters at a time, until each has ended."""
        memories: list[Memory | None] = [None] * len(documents)
        going: dict[int, Iterator[str]] = {}
        for n, document in enumerate(documents):
            memories[n], at = self.kept.find(ids[n]) if self.kept is not None else (None, 0)
            if at is not None:
                going[n] = document.pieces(at, self.every)
        while going:
            pieces = {n: next(piece, None) for n, piece in going.items()}
            ended = [n for n, piece in pieces.items() if piece is None]
            more = [n for n, piece in pieces.items() if piece is not None]
            for n in ended:
                del going[n]
            if more:
                texts = [pieces[n] or "" for n in more]
                read = self.model.read_batch(texts, [memories[n] for n in more], batch_size=self.batch_size)
                for n, after in zip(more, read):
                    memories[n] = after
                    documents[n].at += len(pieces[n] or "")
                    if self.kept is not None and documents[n].at % self.every == 0:
                        self.kept.keep(ids[n], after, documents[n].at)
            for n in ended:
                memory = memories[n]
                if memory is None:
                    raise InputError(f"expected a text, got an empty one: {ids[n]}")
                if self.kept is not None:
                    self.kept.keep(ids[n], memory, None)
        return [memory for memory in memories if memory is not None]


class _Document:
    """A text, or the path of one."""

    def __init__(self, value: str, is_path: bool) -> None:
        self.value, self.is_path = value, is_path
        self.at = 0

    def digest(self) -> str:
        return hashlib.blake2b(self.value.encode(), digest_size=16).hexdigest()

    def pieces(self, at: int, every: int) -> Iterator[str]:
        """The text from a character on, in pieces of `every` characters."""
        self.at = at
        if not self.is_path:
            for begin in range(at, len(self.value), every):
                yield self.value[begin : begin + every]
            return
        # What is no UTF-8 is read as U+FFFD, as `armt read` does, and lines end as they do in the file.
        with open(self.value, encoding="utf-8", errors="replace", newline="") as file:
            left = at
            while left > 0 and (passed := file.read(min(left, _BLOCK))):
                left -= len(passed)
            while piece := file.read(every):
                yield piece


class _Kept:
    """Memories that were finished, and those of texts that were not: ID.mem, and ID.CHARACTERS.part, of one model."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder = folder / fingerprint[:16]
        self.folder.mkdir(parents=True, exist_ok=True)

    def name(self, id: str) -> str:
        plain = len(id) <= 64 and all(c.isalnum() or c in "-_" for c in id)
        return id if plain else hashlib.blake2b(id.encode(), digest_size=16).hexdigest()

    def find(self, id: str) -> tuple[Memory | None, int | None]:
        """The memory of a text and the characters of it that are in it, None where it is finished."""
        name = self.name(id)
        whole = self.folder / f"{name}.mem"
        if whole.exists():
            try:
                return Memory.load(whole), None
            except MemoryFileError:
                whole.unlink()
        for at, part in sorted(((_characters(part), part) for part in self.folder.glob(f"{name}.*.part")), reverse=True):
            try:
                return Memory.load(part), at
            except MemoryFileError:
                part.unlink()
        return None, 0

    def keep(self, id: str, memory: Memory, at: int | None) -> None:
        name = self.name(id)
        before = list(self.folder.glob(f"{name}.*.part"))
        memory.save(self.folder / (f"{name}.mem" if at is None else f"{name}.{at}.part"))
        for part in before:
            if at is None or _characters(part) != at:
                part.unlink(missing_ok=True)


def _objects(values: list[Any]) -> NDArray[np.object_]:
    """A column of values as they are: numpy would cut zeros off the end of bytes."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _characters(part: Path) -> int:
    return int(part.name.split(".")[-2])
