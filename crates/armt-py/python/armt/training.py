"""Training by a recipe: the same loop as `armt train`, heard and stopped from Python, alone or as one of several processes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ._armt import Recipe, TrainableModel, train
from .data import Dataset
from .errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Record = dict[str, Any]
"""What a callback hears: ``event`` ("step" or "validation"), ``stage``, ``step``, ``total``; of a step ``loss``, ``tokens`` and ``seconds``, of a
validation ``exact_match`` or ``loss``."""


class Trainer:
    """Trains a model by a recipe.

    `recipe` is a dict of a recipe's keys, a TOML file, or the name of a recipe that comes with the package; `changes` sets some of its keys
    (``{"optimizer.lr": 1e-3}``). `train` and `valid` are datasets for `task.train` and `task.valid`. The run's folder `out` gets `best/` and
    `last/`, which `Model.from_pretrained` and `armt eval` take, and log.jsonl.

    Each of `callbacks` is called with a record of every step and validation; one that returns False stops the run, which is saved and goes on
    with `resume=True` to the numbers of an unbroken run. So does Ctrl-C.

    Several processes train together where each has a `rank` of `world` and an `all_reduce` that adds up a float32 array over all of them, in
    place: each computes its part of every batch, and all make the same update. `armt.distributed` has this for torch.distributed.
    The first of them writes the folder, which all must see. Their callbacks must all stop after the same record; Ctrl-C ends them without saving, and the
    run goes on from its last checkpoint.
    """

    def __init__(
        self,
        recipe: Mapping[str, Any] | str | os.PathLike[str],
        out: str | os.PathLike[str],
        *,
        changes: Mapping[str, Any] | None = None,
        train: Dataset | None = None,
        valid: Dataset | None = None,
        callbacks: Iterable[Callable[[Record], object]] = (),
        resume: bool = False,
        max_steps: int | None = None,
        device: str = "auto",
        dtype: str | None = None,
        all_reduce: Callable[[NDArray[np.float32]], object] | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        said = dict(changes or {})
        for key, dataset in (("task.train", train), ("task.valid", valid)):
            if dataset is not None:
                said[key] = [str(dataset.path)]
        told = [f"{key}={_toml(key, value)}" for key, value in said.items()]
        if isinstance(recipe, Mapping):
            self.recipe = Recipe.from_json(json.dumps({key: _plain(key, value) for key, value in recipe.items()}), told)
        else:
            self.recipe = Recipe.load(recipe, told)
        self.out = Path(out)
        """The run's folder."""
        self.callbacks = list(callbacks)
        self.resume, self.max_steps = resume, max_steps
        self.device, self.dtype = device, dtype
        self.all_reduce, self.rank, self.world = all_reduce, rank, world
        self._kept = (train, valid)

    def fit(self) -> dict[str, float] | None:
        """Trains to the end of the recipe: what the last stage's best validation measured, ``{"exact_match": 0.99}`` or ``{"loss": 2.1}``. None
        if the run was stopped before, by a callback or after `max_steps`."""
        made = 0

        def each(record: Record) -> bool:
            nonlocal made
            made += record["event"] == "step"
            said = [callback(record) for callback in self.callbacks]
            goes_on = not any(isinstance(answer, (bool, np.bool_)) and not answer for answer in said)
            return goes_on and (self.max_steps is None or made < self.max_steps)

        measured = train(
            self.recipe,
            self.out,
            resume=self.resume,
            device=self.device,
            dtype=self.dtype,
            each=each,
            all_reduce=self.all_reduce,
            rank=self.rank,
            world=self.world,
        )
        return None if measured is None else dict([measured])

    def first_model(self) -> TrainableModel:
        """The model before the first step, for whoever makes the steps himself."""
        return self.recipe.first_model(self.device, self.dtype)

    def first_batch(self, step: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """What a step of the first stage learns from: tokens, and what each should predict (-1: nothing), both [texts, tokens]."""
        return self.recipe.first_batch(step)


def _plain(key: str, value: object) -> Any:
    """A value of a recipe as JSON has it. Numbers of numpy and paths are what they stand for; what no recipe can have is refused by its key."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, Mapping):
        return {name: _plain(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(key, item) for item in value]
    if isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise InputError(f"{key}: expected a number, a text, true or false, or a list or dict of these, got {value!r}")


def _toml(key: str, value: object) -> str:
    """A value as TOML, which `changes` are given in."""
    value = _plain(key, value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)} = {_toml(key, item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(key, item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)
