"""Training in several processes: real ones, over Gloo, under torchrun and under Ray Train."""

import importlib.util
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import armt
import numpy as np
import pytest
from conftest import ROOT, losses, weights

STEPS = 20
RECIPE = {
    "seed": 1,
    "task": {"setting": "remember", "symbols": 8},
    "model": {"layers": 2, "width": 32, "heads": 2, "inner": 64},
    "memory": {"kind": "associative", "tokens": 2, "d_mem": 8},
    "eval": {"every": 10, "samples": 20, "batch": 20},
    "stage": [{"pairs": 2, "batch": 8, "steps": 8, "until": "never"}, {"pairs": 3, "batch": 8, "steps": STEPS - 8, "until": "never", "vary": True}],
}  # fmt: skip
TOML = """
seed = 1
task = { setting = "remember", symbols = 8 }
model = { layers = 2, width = 32, heads = 2, inner = 64 }
memory = { kind = "associative", tokens = 2, d_mem = 8 }
eval = { every = 10, samples = 20, batch = 20 }
stage = [{ pairs = 2, batch = 8, steps = 8, until = "never" }, { pairs = 3, batch = 8, steps = 12, until = "never", vary = true }]
"""
EXAMPLES = ROOT / "crates/armt-py/examples"


def two_replicas(out, recipe=RECIPE, own=({}, {}), device="cpu", **options):
    """Two replicas in threads of this process, which adds up the two halves of every gradient: what each measured, and what failed. `own` is what
    only one of them is told."""
    inbox, done, failed = [queue.SimpleQueue(), queue.SimpleQueue()], [None, None], []

    def replica(rank):
        def add_up(values):
            inbox[1 - rank].put(values.copy())
            other = inbox[rank].get(timeout=60)
            if other is None:
                raise RuntimeError("the other replica has failed")
            values += other

        try:
            # As many threads as a process of torchrun's has: other numbers of them round sums elsewhere.
            armt.set_threads(1)
            done[rank] = armt.Trainer(recipe, out, all_reduce=add_up, rank=rank, world=2, device=device, **options, **own[rank]).fit()
        except Exception as error:
            failed.append(error)
            inbox[1 - rank].put(None)

    threads = [threading.Thread(target=replica, args=(rank,)) for rank in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    after = threading.Thread(target=armt.set_threads, args=(armt.get_threads(),))
    after.start()
    after.join()
    return done, failed


def in_one_process(out, **options):
    """What two replicas measured."""
    done, failed = two_replicas(out, **options)
    assert not failed, failed
    return done


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    out = tmp_path_factory.mktemp("halves") / "run"
    done = in_one_process(out)
    assert done[0] == done[1] is not None and len(losses(out)) == STEPS
    return out


def test_two_halves_make_the_step_of_the_whole(halves, tmp_path):
    parts = {f"stage.{n}.accumulate": 2 for n in (1, 2)}
    armt.Trainer(RECIPE, tmp_path / "alone", changes=parts, device="cpu").fit()
    # One gradient that all parts are added to rounds elsewhere.
    assert np.allclose(losses(halves), losses(tmp_path / "alone"), rtol=1e-4)
    assert losses(halves)[0] == pytest.approx(losses(tmp_path / "alone")[0], rel=1e-6)


def test_a_run_goes_on_with_another_number_of_processes(halves, tmp_path):
    in_one_process(tmp_path / "run", max_steps=5)
    parts = {f"stage.{n}.accumulate": 1 for n in (1, 2)}
    armt.Trainer(RECIPE, tmp_path / "run", resume=True, max_steps=7, changes=parts, device="cpu").fit()
    in_one_process(tmp_path / "run", resume=True)
    assert np.allclose(losses(tmp_path / "run"), losses(halves), rtol=1e-3), "the same texts are drawn"
    assert losses(tmp_path / "run")[:5] == losses(halves)[:5]


def test_what_cannot_be_shared_is_refused(tmp_path):
    def run(changes):
        return armt.Trainer(RECIPE, tmp_path / "run", changes=changes, all_reduce=lambda values: None, rank=0, world=3, device="cpu").fit()

    with pytest.raises(armt.InputError, match="a multiple of 1 parts by 3 processes, got 8"):
        run({})
    with pytest.raises(armt.InputError, match="0 where several processes train together"):
        run({"stage.1.carry": 0.5})
    with pytest.raises(armt.InputError, match="rank 3 of 3"):
        armt.Trainer(RECIPE, tmp_path / "run", all_reduce=print, rank=3, world=3).fit()


def test_processes_with_different_recipes_are_refused(tmp_path):
    done, failed = two_replicas(tmp_path / "run", own=({"changes": {"seed": 1}}, {"changes": {"seed": 2}}))
    assert done == [None, None] and [type(error) for error in failed] == [armt.InputError] * 2, failed
    assert all("one for all processes" in str(error) for error in failed), failed


def test_processes_may_write_the_same_rows_each_for_itself(tmp_path):
    rows = [{"context": f"Mary went to the {room}.", "question": "Where is Mary?", "answer": room} for room in ("kitchen", "garden")]
    recipe = RECIPE | {
        "task": {"setting": "qa", "train": [], "bpe": str(ROOT / "data/books-bpe")},
        "stage": [{"segment": 32, "segments": 2, "batch": 2, "steps": 2}],
    }  # fmt: skip
    own = [{"train": armt.Dataset.from_rows(rows), "valid": armt.Dataset.from_rows(rows)} for _ in range(2)]
    done = in_one_process(tmp_path / "run", recipe=recipe, own=own)
    assert done[0] == done[1] is not None


def test_a_first_checkpoint_that_others_may_be_reading_is_not_written_anew(tmp_path):
    def fail(values):
        if values.size > 100:
            raise ConnectionError("gone at the first gradient")
        values *= 2

    with pytest.raises(ConnectionError):
        armt.Trainer(RECIPE, tmp_path / "run", all_reduce=fail, rank=0, world=2, device="cpu").fit()
    last, found = tmp_path / "run/last", []
    before = last.stat().st_ino
    armt.Trainer(RECIPE, tmp_path / "run", callbacks=[lambda record: found.append(last.stat().st_ino)], resume=True, max_steps=1, device="cpu").fit()
    assert found == [before]


def test_what_an_all_reduce_raises_comes_out(tmp_path):
    def fail(values):
        raise ConnectionError("the other is gone")

    with pytest.raises(ConnectionError, match="the other is gone"):
        armt.Trainer(RECIPE, tmp_path / "run", all_reduce=fail, rank=0, world=2, device="cpu").fit()


TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")


def processes(names, script, world, *arguments):
    """Starts processes by the environment variables of torchrun or of a step of Slurm's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1"} if names == TORCHRUN else {"SLURM_STEP_NUM_NODES": "1"}
    place |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env=os.environ | place | dict(zip(names, map(str, (world, rank, rank)))),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip


def torchrun(folder, *options):
    """A run by the example in two processes over Gloo, which torchrun starts."""
    pytest.importorskip("torch")
    (folder / "recipe.toml").write_text(TOML)
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLES / "train_torchrun.py"]
    command = [*start, folder / "recipe.toml", folder / "run", "--backend", "gloo", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "finished: {'exact_match'" in done.stdout
    return folder / "run"


def same_bits(run, other):
    assert losses(run) == losses(other)
    for model in ("last", "best"):
        assert weights(run / model) == weights(other / model)


def test_torchrun_gives_the_bits_of_one_process_that_adds_the_halves(halves, tmp_path):
    same_bits(torchrun(tmp_path, "--device", "cpu"), halves)


def test_a_step_of_slurm_gives_these_bits_too(halves, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "recipe.toml").write_text(TOML)
    both = processes(SLURM, EXAMPLES / "train_torchrun.py", 2, tmp_path / "recipe.toml", tmp_path / "run", "--backend", "gloo", "--device", "cpu")
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    same_bits(tmp_path / "run", halves)


def test_two_processes_share_a_gpu_with_the_bits_of_one_process_that_adds_the_halves(tmp_path):
    try:
        armt.Model.from_pretrained("babilong-qa1", device="cuda:0")
    except armt.Error as error:
        pytest.skip(f"there is no GPU to share: {error}")
    in_one_process(tmp_path / "halves", device="cuda:0")
    same_bits(torchrun(tmp_path, "--device", "cuda:0"), tmp_path / "halves")


def test_a_process_that_dies_is_an_error_on_the_others(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "dies.py"
    script.write_text(
        f"import armt, os\nfrom armt.distributed import torch_replica\nreplica = torch_replica(timeout=20)\n"
        f"def die(record):\n    if replica['rank'] == 1 and record['total'] == 4: os._exit(9)\n"
        f"armt.Trainer({RECIPE!r}, {str(tmp_path / 'run')!r}, callbacks=[die], **replica).fit()\n"
    )
    first, second = processes(TORCHRUN, script, 2)
    started = time.monotonic()
    said, _ = first.communicate(timeout=120)
    assert second.wait(60) == 9
    assert first.returncode not in (0, None) and "RuntimeError" in said, said[-2000:]
    assert time.monotonic() - started < 60
    assert (tmp_path / "run/last/state.json").exists(), "the run can be gone on with"


@pytest.fixture(scope="module")
def ray_train():
    pytest.importorskip("torch")
    ray = pytest.importorskip("ray")
    spec = importlib.util.spec_from_file_location("train_ray", EXAMPLES / "train_ray.py")
    example = importlib.util.module_from_spec(spec)
    sys.modules["train_ray"] = example
    spec.loader.exec_module(example)
    ray.cloudpickle.register_pickle_by_value(example)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield example
    ray.shutdown()
    # Ray Train leaves its own behind.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ray_train_gives_these_bits_too(ray_train, halves, tmp_path, monkeypatch):
    (tmp_path / "recipe.toml").write_text(TOML)
    # A path of this folder, which workers are not in.
    monkeypatch.chdir(tmp_path)
    ray_train.fit("recipe.toml", "run", storage=str(tmp_path / "ray"), failures=0)
    assert losses(tmp_path / "run") == losses(halves)
    assert weights(tmp_path / "run/last") == weights(halves / "last")


def test_ray_starts_a_worker_that_dies_anew(ray_train, halves, tmp_path):
    died = tmp_path / "died"

    def die(record):
        if record["total"] == 13 and not died.exists():
            died.touch()
            os._exit(9)

    ray_train.fit(RECIPE, tmp_path / "run", storage=str(tmp_path / "ray"), callbacks=[die], failures=2)
    assert died.exists() and losses(tmp_path / "run") == losses(halves)
    assert weights(tmp_path / "run/last") == weights(halves / "last")
