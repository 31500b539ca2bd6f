"""Rows to learn from and to be judged on, as lines of JSON in a file: that is what recipes read, and what any size fits into."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ._armt import write_babilong
from .errors import InputError, NotFoundError


class Dataset:
    """Rows in a file of lines of JSON. It is read as it is iterated over, never kept.

    For a recipe with ``task.setting = "qa"`` rows have ``context``, ``question`` and ``answer``; with ``"text"`` they have ``text``.
    """

    def __init__(self, path: str | os.PathLike[str], *, owned: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self.path = Path(path)
        """The file."""
        self._owned = owned
        if not self.path.is_file():
            raise NotFoundError(f"{self.path}: there is no such file")

    @classmethod
    def from_jsonl(cls, path: str | os.PathLike[str]) -> Dataset:
        """The rows of a file of lines of JSON, which stays as it is."""
        return cls(path)

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]], path: str | os.PathLike[str] | None = None) -> Dataset:
        """Writes rows, of a list or of a Hugging Face dataset (a streamed one too), to a file: `path`, or one that lasts as long as the
        dataset does. To a run these are the same where they hold the same, so that it goes on with them made anew."""
        place, owned = _place(path)
        written = 0
        with open(place.with_name(place.name + ".new"), "w", encoding="utf-8") as out:
            for row in rows:
                out.write(json.dumps(dict(row), ensure_ascii=False) + "\n")
                written += 1
        if written == 0:
            raise InputError("expected at least one row, got none")
        os.replace(place.with_name(place.name + ".new"), place)
        return cls(_named(place, owned), owned=owned)

    @classmethod
    def from_hf(cls, dataset: Iterable[Mapping[str, Any]], path: str | os.PathLike[str] | None = None) -> Dataset:
        """The rows of a Hugging Face dataset, as `from_rows` writes them."""
        return cls.from_rows(dataset, path)

    @classmethod
    def babilong(
        cls,
        task: str = "qa1",
        length: str = "1k",
        *,
        samples: int = 100,
        seed: int = 0,
        split: str = "test",
        simulated: bool = False,
        path: str | os.PathLike[str] | None = None,
    ) -> Dataset:
        """BABILong samples as `armt data babilong` writes them: rows with input, question and target. The training split has simulated
        stories only."""
        place, owned = _place(path)
        write_babilong(place, task, length, samples=samples, seed=seed, split=split, simulated=simulated)
        return cls(_named(place, owned), owned=owned)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with open(self.path, encoding="utf-8") as lines:
            for line in lines:
                if line.strip():
                    yield json.loads(line)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Dataset({str(self.path)!r})"


def _place(path: str | os.PathLike[str] | None) -> tuple[Path, tempfile.TemporaryDirectory[str] | None]:
    if path is not None:
        return Path(path), None
    owned = tempfile.TemporaryDirectory(prefix="armt-dataset-")
    return Path(owned.name) / "rows.jsonl", owned


def _named(place: Path, owned: tempfile.TemporaryDirectory[str] | None) -> Path:
    """Names a file of ours by what it holds: a recipe takes such a file for the same wherever it lies, in another process and after this one."""
    if owned is None:
        return place
    digest = hashlib.blake2b(digest_size=16)
    with open(place, "rb") as rows:
        while block := rows.read(1 << 20):
            digest.update(block)
    named = place.with_name(f"armt-rows-{digest.hexdigest()}.jsonl")
    os.replace(place, named)
    return named
