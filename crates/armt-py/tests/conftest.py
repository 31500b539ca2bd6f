"""What the tests share. They run against the installed package; ARMT_CLI names the command that it must agree with."""

import json
import os
import signal
import subprocess
from pathlib import Path

import armt
import pytest

ROOT = Path(__file__).resolve().parents[3]
# What a shell starts in the background does not hear Ctrl-C, which some tests press.
signal.signal(signal.SIGINT, signal.default_int_handler)
STORY = "It was a dark night. Mary went to the kitchen. John moved to the garden. The rain fell. "


@pytest.fixture(scope="session")
def model():
    return armt.Model.from_pretrained("babilong-qa1", device="cpu")


@pytest.fixture(scope="session")
def book():
    """A text of some thousand tokens, with words beyond ASCII."""
    text = (ROOT / "data/books/test").glob("*.txt")
    return next(iter(sorted(text))).read_text(encoding="utf-8")[:120_000]


@pytest.fixture(scope="session")
def cli():
    """Runs the command line and gives what it prints."""
    program = os.environ.get("ARMT_CLI")
    if not program:
        pytest.skip("ARMT_CLI names no command to compare with")

    def run(*arguments):
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def losses(folder):
    """The loss of every step of a run."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "lr" in line]


def weights(folder):
    return (folder / "model.safetensors").read_bytes()
