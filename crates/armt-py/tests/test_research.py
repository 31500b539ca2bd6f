"""A model from inside: logits, layers, memories, gradients."""

import importlib.util
import math
import threading

import armt
import numpy as np
import pytest
from conftest import ROOT, STORY

SMALL = {
    "seed": 1,
    "task": {"setting": "remember", "symbols": 8},
    "model": {"layers": 2, "width": 16, "heads": 2, "inner": 24, "init": 0.2},
    "memory": {"kind": "associative", "tokens": 2, "d_mem": 4},
    "stage": [{"pairs": 3, "batch": 2, "steps": 4}],
}


def test_a_probe_shows_what_a_pass_computes(model):
    ids = model.encode(STORY * 60)
    segments = math.ceil(len(ids) / model.segment_size)
    assert segments >= 3
    shown = model.probe(ids)
    logits, after = model.forward(ids)
    assert shown.logits.shape == (len(ids), model.vocabulary)
    assert shown.hidden.shape == (model.layers + 1, len(ids), model.width)
    assert len(shown.memories) == segments and [m.segments_read for m in shown.memories] == list(range(1, segments + 1))
    assert np.allclose(shown.logits, logits, atol=2e-4)
    assert np.allclose(shown.memories[-1].A, after.A, atol=1e-5) and np.allclose(shown.memories[-1].z, after.z, atol=1e-5)
    assert not np.allclose(shown.memories[0].A, shown.memories[1].A)
    assert not np.allclose(shown.hidden[0], shown.hidden[1])


def test_a_probe_goes_on_from_a_memory(model):
    ids = model.encode(STORY * 60)
    size = model.segment_size
    whole = model.probe(ids[: 2 * size])
    rest = model.probe(ids[size : 2 * size], model.probe(ids[:size]).memories[0])
    assert np.array_equal(rest.logits, whole.logits[size:]) and np.array_equal(rest.memories[0].A, whole.memories[1].A)


def test_logprobs_are_of_the_logits(model):
    ids = np.array(model.encode(STORY * 3))
    logits = model.forward(ids)[0].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    expected = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(len(ids) - 1), ids[1:]]
    assert np.allclose(model.logprobs(ids), expected, atol=1e-4)


def test_gradients_are_those_of_finite_differences(tmp_path):
    model = armt.Trainer(SMALL, tmp_path / "run", device="cpu").first_model()
    ids, _ = armt.Trainer(SMALL, tmp_path / "run", device="cpu").first_batch()
    weights = np.random.default_rng(0).normal(size=(*ids.shape, model.vocabulary)).astype(np.float32)

    def value():
        return float((np.tanh(model.forward(ids).astype(np.float64)) * weights).sum())

    gradients = model.gradients(ids, lambda logits: weights / np.cosh(logits) ** 2)
    parameters = model.parameters()
    assert set(gradients) == set(parameters)
    checked = 0
    for name, own in parameters.items():
        flat = gradients[name].reshape(-1)
        place = int(np.abs(flat).argmax())
        if abs(flat[place]) < 0.05:
            continue
        step = 1e-2
        sides = []
        for sign in (1, -1):
            moved = own.copy()
            moved.reshape(-1)[place] += sign * step
            model.set_parameters({name: moved})
            sides.append(value())
        model.set_parameters({name: own})
        assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(flat[place], rel=0.05, abs=0.02), name
        checked += 1
    assert checked > 10
    assert all(np.array_equal(value, parameters[name]) for name, value in model.parameters().items())


def test_what_does_not_fit_is_refused(tmp_path):
    model = armt.Trainer(SMALL, tmp_path / "run", device="cpu").first_model()
    ids, _ = armt.Trainer(SMALL, tmp_path / "run", device="cpu").first_batch()
    name, value = next(iter(model.parameters().items()))
    with pytest.raises(armt.InputError, match="a parameter of the model, got nobody"):
        model.set_parameters({"nobody": value})
    with pytest.raises(armt.InputError, match="of shape"):
        model.set_parameters({name: value.reshape(-1)[:3]})
    with pytest.raises(armt.Error, match="not a finite number"):
        model.set_parameters({name: value * np.nan})
    with pytest.raises(armt.InputError, match="a derivative with the logits' shape"):
        model.gradients(ids, lambda logits: logits[:1])
    with pytest.raises(ZeroDivisionError):
        model.gradients(ids, lambda logits: 1 / 0)
    with pytest.raises(armt.InputError, match="outside the vocabulary"):
        model.forward(ids + 10_000)


def test_a_step_made_by_hand_is_the_trainers(tmp_path):
    path = ROOT / "crates/armt-py/examples/own_training_step.py"
    spec = importlib.util.spec_from_file_location("own_training_step", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main(tmp_path) < 1e-6


def test_threads_have_gradients_of_their_own(tmp_path):
    small = armt.Trainer(SMALL, tmp_path / "run", device="cpu").first_model()
    ids = np.arange(24).reshape(2, 12) % 8
    expected = [small.gradients(ids, lambda logits, n=n: np.full_like(logits, n) * logits) for n in (1.0, 2.0)]
    wrong = []

    def again(n):
        for _ in range(30):
            found = small.gradients(ids, lambda logits: np.full_like(logits, n + 1.0) * logits)
            wrong.extend(name for name in found if not np.array_equal(found[name], expected[n][name]))

    threads = [threading.Thread(target=again, args=(n,)) for n in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_arrays_that_numpy_would_cut_are_refused(model, tmp_path):
    small = armt.Trainer(SMALL, tmp_path / "run", device="cpu").first_model()
    ids = np.arange(24).reshape(2, 12) % 8
    for slopes, word in (
        (lambda logits: logits.T, "shape"),
        (lambda logits: logits.reshape(-1), "shape"),
        (lambda logits: logits * np.nan, "finite"),
    ):
        with pytest.raises(armt.InputError, match=word):
            small.gradients(ids, slopes)
    for tokens in (np.array([2**32 + 5, 6]), [5.9, 6.9], [True, False], np.array([np.nan]), np.array([2**63], dtype=np.uint64), b"abc", [[1, 2]]):
        with pytest.raises(armt.InputError):
            model.forward(tokens)
    assert np.array_equal(model.forward(np.array([5, 6], dtype=np.uint8))[0], model.forward([5, 6])[0])


def test_the_answer_of_a_stream_is_there_for_every_thread(model):
    stream = model.generate_stream("Mary", model.read(STORY), max_tokens=40, temperature=1.5)
    said = "".join(stream)
    found = []
    threads = [threading.Thread(target=lambda: found.extend(str(stream.answer) for _ in range(2000)), daemon=True) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert len(found) == 8000 and set(found) == {said}
