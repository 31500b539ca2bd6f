import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from ._answer import Answer
from ._probe import Probe

__all__ = [
    "Memory",
    "Model",
    "Recipe",
    "Stream",
    "TrainableModel",
    "__version__",
    "get_threads",
    "set_threads",
    "train",
    "write_babilong",
]

__version__: str

_Text: TypeAlias = str | os.PathLike[str] | Iterable[str]
_Progress: TypeAlias = bool | Callable[[int], object] | None
_Tokens: TypeAlias = Sequence[int] | NDArray[np.integer]
_Texts: TypeAlias = Sequence[Sequence[int]] | NDArray[np.integer]

def set_threads(threads: int, /) -> None: ...
def get_threads() -> int: ...
@final
class Memory:
    @staticmethod
    def load(path: str | os.PathLike[str]) -> Memory: ...
    @staticmethod
    def from_bytes(data: bytes) -> Memory: ...
    def save(self, path: str | os.PathLike[str]) -> None: ...
    def to_bytes(self) -> bytes: ...
    def arrays(self) -> dict[str, NDArray[np.float32]]: ...
    @property
    def A(self) -> NDArray[np.float32]: ...
    @property
    def z(self) -> NDArray[np.float32]: ...
    @property
    def tokens_read(self) -> int: ...
    @property
    def segments_read(self) -> int: ...
    @property
    def open_tokens(self) -> int: ...
    @property
    def open_bytes(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def model_name(self) -> str | None: ...
    @property
    def nbytes(self) -> int: ...
    def __bytes__(self) -> bytes: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Callable[[bytes], Memory], tuple[bytes]]: ...

@final
class Stream(Iterator[str]):
    def __iter__(self) -> Self: ...
    def __next__(self) -> str: ...
    @property
    def answer(self) -> Answer: ...

@final
class Model:
    @staticmethod
    def from_pretrained(
        name: str | os.PathLike[str],
        *,
        adapter: str | os.PathLike[str] | None = None,
        device: str = "auto",
        dtype: str | None = None,
    ) -> Model: ...
    def read(
        self, text: _Text, memory: Memory | None = None, *, new_document: bool = False, progress: _Progress = None
    ) -> Memory: ...
    def read_batch(
        self,
        texts: Sequence[_Text],
        memories: Sequence[Memory | None] | None = None,
        *,
        batch_size: int = 16,
        progress: _Progress = None,
    ) -> list[Memory]: ...
    def ask(
        self,
        memory: Memory | None,
        question: str,
        *,
        max_tokens: int = 64,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str] = ...,
    ) -> Answer: ...
    def generate(
        self,
        prompt: str,
        memory: Memory | None = None,
        *,
        max_tokens: int = 64,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str] = ...,
    ) -> Answer: ...
    def ask_stream(
        self,
        memory: Memory | None,
        question: str,
        *,
        max_tokens: int = 64,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str] = ...,
    ) -> Stream: ...
    def generate_stream(
        self,
        prompt: str,
        memory: Memory | None = None,
        *,
        max_tokens: int = 64,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str] = ...,
    ) -> Stream: ...
    def logprobs(self, text: str | _Tokens, memory: Memory | None = None) -> NDArray[np.float32]: ...
    def forward(self, text: str | _Tokens, memory: Memory | None = None) -> tuple[NDArray[np.float32], Memory]: ...
    def probe(self, text: str | _Tokens, memory: Memory | None = None) -> Probe: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def segment_size(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...
    def __reduce__(self) -> tuple[Callable[..., Model], tuple[object, ...]]: ...

@final
class TrainableModel:
    @staticmethod
    def from_pretrained(
        name: str | os.PathLike[str], *, device: str = "auto", dtype: str | None = None
    ) -> TrainableModel: ...
    def parameters(self) -> dict[str, NDArray[np.float32]]: ...
    def set_parameters(self, parameters: dict[str, NDArray[np.float32]]) -> None: ...
    def forward(self, ids: _Texts) -> NDArray[np.float32]: ...
    def gradients(
        self, ids: _Texts, loss: Callable[[NDArray[np.float32]], NDArray[np.float32]]
    ) -> dict[str, NDArray[np.float32]]: ...
    def save(self, folder: str | os.PathLike[str]) -> None: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def segment_size(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...

@final
class Recipe:
    @staticmethod
    def load(name: str | os.PathLike[str], changes: Sequence[str]) -> Recipe: ...
    @staticmethod
    def from_json(text: str, changes: Sequence[str]) -> Recipe: ...
    def record(self) -> dict[str, str]: ...
    def first_model(self, device: str, dtype: str | None) -> TrainableModel: ...
    def first_batch(self, step: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...

def train(
    recipe: Recipe,
    out: str | os.PathLike[str],
    *,
    resume: bool,
    device: str,
    dtype: str | None,
    each: Callable[[dict[str, Any]], object],
    all_reduce: Callable[[NDArray[np.float32]], object] | None,
    rank: int,
    world: int,
) -> tuple[str, float] | None: ...
def write_babilong(
    path: str | os.PathLike[str], task: str, length: str, *, samples: int, seed: int, split: str, simulated: bool
) -> None: ...
