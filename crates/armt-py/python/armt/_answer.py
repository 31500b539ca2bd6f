"""What a model has said."""

from __future__ import annotations

import math


class Answer(str):
    """An answer: a str, with its tokens and how probable each was."""

    tokens: list[int]
    """Its tokens, and the one that ended it where one did."""
    pieces: list[str]
    """What each token adds to the text; nothing while a character is not whole, and where it ends the answer."""
    probabilities: list[float]
    """How probable each token was, of all tokens that could have come."""

    def __new__(cls, text: str, tokens: list[int], pieces: list[str], probabilities: list[float]) -> Answer:
        self = super().__new__(cls, text)
        self.tokens, self.pieces, self.probabilities = tokens, pieces, probabilities
        return self

    def __getnewargs__(self) -> tuple[str, list[int], list[str], list[float]]:  # type: ignore[override]
        return str(self), self.tokens, self.pieces, self.probabilities

    @property
    def probability(self) -> float:
        """How probable the answer was: the product over its tokens."""
        return math.prod(self.probabilities)
