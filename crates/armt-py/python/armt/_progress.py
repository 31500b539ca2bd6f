"""What `progress=True` shows: tqdm's bar where that is installed, and else a line every two seconds."""

from __future__ import annotations

import sys
import time
from typing import Callable


def bar() -> Callable[[int], None]:
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return _lines()
    shown = tqdm(unit=" tokens", unit_scale=True)

    def show(tokens: int) -> None:
        shown.update(tokens - shown.n)

    return show


def _lines() -> Callable[[int], None]:
    started = last = time.monotonic()

    def show(tokens: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 2:
            last = now
            print(f"{tokens:,} tokens read, {tokens / (now - started):,.0f} tokens/s", file=sys.stderr, flush=True)

    return show
