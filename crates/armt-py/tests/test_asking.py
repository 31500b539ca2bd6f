"""Questions against memories."""

import json
import pickle

import armt
import numpy as np
import pytest
from conftest import STORY


@pytest.fixture(scope="module")
def memory(model):
    return model.read(STORY)


def test_answers_are_those_of_the_command_line(model, memory, cli, tmp_path):
    memory.save(tmp_path / "a.mem")
    for question, options, flags in [
        ("Where is Mary?", {}, []),
        ("Where is John?", {"temperature": 1.5, "top_k": 5, "seed": 3, "max_tokens": 9}, ["--temperature", 1.5, "--top-k", 5, "--seed", 3, "--max-tokens", 9]),
        ("Where is Mary?", {"stop": ["tch"]}, ["--stop", "tch"]),
    ]:  # fmt: skip
        said = json.loads(cli("ask", "babilong-qa1", "--memory", tmp_path / "a.mem", question, "--json", "--device", "cpu", *flags))
        answer = model.ask(memory, question, **options)
        assert answer == said["answer"] and answer.tokens == [t["token"] for t in said["tokens"]]
        assert answer.probabilities == pytest.approx([t["probability"] for t in said["tokens"]], rel=1e-6)
        assert answer.probability == pytest.approx(said["probability"], rel=1e-6)


def test_an_answer_is_a_str_that_knows_its_tokens(model, memory):
    answer = model.ask(memory, "Where is Mary?")
    assert answer == "kitchen" and isinstance(answer, str) and "".join(answer.pieces) == answer
    again = pickle.loads(pickle.dumps(answer))
    assert again == answer and again.tokens == answer.tokens and again.probability == answer.probability


def test_a_stream_gives_the_answer_in_pieces(model, memory):
    stream = model.ask_stream(memory, "Where is John?")
    with pytest.raises(armt.InputError, match="heard to its end"):
        stream.answer
    pieces = list(stream)
    assert "".join(pieces) == "garden" and len(pieces) > 1 and stream.answer == "garden" and list(stream) == []
    assert "".join(model.generate_stream(STORY, max_tokens=7)) == model.generate(STORY, max_tokens=7)
    next(model.generate_stream(STORY, memory, max_tokens=100_000))  # what nobody holds ends


def test_a_question_leaves_the_memory_as_it_was(model, memory):
    kept = memory.to_bytes()
    assert [model.ask(memory, f"Where is {who}?") for who in ("Mary", "John", "Mary")] == ["kitchen", "garden", "kitchen"]
    assert memory.to_bytes() == kept
    with pytest.raises(armt.InputError, match="expected a question, got nothing"):
        model.ask(memory, "")


def test_probabilities_of_tokens_are_those_of_answers(model, memory):
    question = model.encode("Where is Mary?")
    answer = model.generate("Where is Mary?", memory, max_tokens=5)
    found = model.logprobs(question + answer.tokens, memory)
    assert found.shape == (len(question) + len(answer.tokens) - 1,) and found.dtype == np.float32
    assert np.exp(found[len(question) - 1 :]) == pytest.approx(answer.probabilities, rel=1e-4)
    assert np.array_equal(model.logprobs("Where is Mary?", memory), found[: len(question) - 1])
