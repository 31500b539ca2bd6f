"""What a pass shows of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ._armt import Memory


class Probe(NamedTuple):
    """All that a pass through a text has computed."""

    logits: NDArray[np.float32]
    """Of every token: [tokens, vocabulary]."""
    hidden: NDArray[np.float32]
    """Outputs of the embedding and of each layer, before the last norm: [layers + 1, tokens, width]."""
    memories: list[Memory]
    """The memory after each segment, with its A and z."""
