import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from ._answer import Answer

__all__ = ["Memory", "Model", "Stream", "__version__", "get_threads", "set_threads"]

__version__: str

_Text: TypeAlias = str | os.PathLike[str] | Iterable[str]
_Progress: TypeAlias = bool | Callable[[int], object] | None

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
