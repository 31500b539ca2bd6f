"""Threads, processes, pickle, and that nothing is lost on the way."""

import concurrent.futures as futures
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time

import armt
import pytest
from conftest import STORY


def test_a_model_is_pickled_as_its_name(model):
    again = pickle.loads(pickle.dumps(model))
    assert again.fingerprint == model.fingerprint and len(pickle.dumps(model)) < 1000


def test_eight_threads_read_what_one_reads(model, book):
    texts = [book[n * 5_000 : n * 5_000 + 20_000] for n in range(8)]
    alone = [model.read(text) for text in texts]
    with futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(model.read, texts)) == alone


def test_other_threads_run_while_one_reads(model, book):
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.002)

    thread = threading.Thread(target=tick)
    thread.start()
    model.read(book)
    done.set()
    thread.join()
    assert len(ticks) > 10 and max(b - a for a, b in zip(ticks, ticks[1:])) < 0.5


def _read(model, text):
    return model.read(text)


def test_processes_that_are_spawned_read_the_same(model, book):
    with futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert list(pool.map(_read, [model] * 2, [book[:30_000], STORY])) == [model.read(book[:30_000]), model.read(STORY)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_after_the_first_use_is_refused_and_does_not_hang(model):
    model.read(STORY)
    script = (
        "import armt, os, sys\n"
        "model = armt.Model.from_pretrained('babilong-qa1', device='cpu'); model.read('Mary went.')\n"
        "if os.fork() == 0:\n"
        "    try: model.read('Mary went.')\n"
        "    except armt.Error as error: os._exit(7 if 'spawn' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 7


def test_threads_can_be_set_before_the_first_computation():
    script = (
        "import armt\n"
        "assert armt.get_threads() == 3\n"
        "armt.set_threads(1); assert armt.get_threads() == 1\n"
        "model = armt.Model.from_pretrained('babilong-qa1', device='cpu'); model.read('Mary went.')\n"
        "armt.set_threads(1)\n"
        "try: armt.set_threads(2)\n"
        "except armt.InputError: pass\n"
        "else: raise SystemExit(1)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "RAYON_NUM_THREADS"} | {"OMP_NUM_THREADS": "3"}
    assert subprocess.run([sys.executable, "-c", script], env=environment, timeout=60, check=False).returncode == 0


def _resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="there is no /proc here")
def test_a_thousand_readings_take_no_more_memory(model):
    text = STORY * 20
    for _ in range(200):
        model.ask(model.read(text), "Where is Mary?", max_tokens=2)
    before = _resident()
    for _ in range(1000):
        memory = model.read(text)
        memory.A.sum()
        model.ask(memory, "Where is Mary?", max_tokens=2)
    assert _resident() - before < 8 << 20


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="there is no /proc here")
def test_hundreds_of_streams_take_no_more_memory(model):
    memory = model.read(STORY)

    def listen(times):
        for n in range(times):
            stream = model.ask_stream(memory, "Where is Mary?", max_tokens=3)
            # Some are left before their end.
            list(stream) if n % 3 else next(stream)

    listen(60)
    before = _resident()
    listen(600)
    assert _resident() - before < 2 << 20
