"""How a pickled model comes back: it is loaded where it arrives."""

from __future__ import annotations

from . import Model


def load_model(name: str, adapter: str | None, device: str, dtype: str | None) -> Model:
    return Model.from_pretrained(name, adapter=adapter, device=device, dtype=dtype)
