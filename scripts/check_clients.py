"""The `openai` package and lm-evaluation-harness against a real `armt serve`, compared with `armt eval` and `armt ask`."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Nothing is fetched while it runs.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OPENAI_API_KEY="a-key-for-this-check", TOKENIZERS_PARALLELISM="false")

ROOMS = ["bathroom", "bedroom", "garden", "hallway", "kitchen", "office"]
MODEL = "models/babilong-qa1"


def openai_package(address: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key=os.environ["OPENAI_API_KEY"])
    name = client.models.list().data[0].id
    prompt = "Mary went to the kitchen. John moved to the garden. Where is Mary?GEN"
    whole = client.completions.create(model=name, prompt=prompt, max_tokens=4, temperature=0)
    assert whole.choices[0].text == "kitchen" and whole.choices[0].finish_reason == "stop", whole
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    pieces = client.completions.create(model=name, prompt=prompt, max_tokens=4, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "kitchen"
    several = client.completions.create(model=name, prompt=[prompt, prompt.replace("Mary?", "John?")], max_tokens=4, temperature=0)
    assert [choice.text for choice in several.choices] == ["kitchen", "garden"]
    scored = client.completions.create(model=name, prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=2)
    assert len(scored.choices[0].logprobs.token_logprobs) == whole.usage.prompt_tokens + 1
    for wrong, kind in [({"prompt": ""}, openai.BadRequestError), ({"prompt": "a", "n": 2}, openai.BadRequestError)]:
        try:
            client.completions.create(model=name, **wrong)
        except kind:
            continue
        raise AssertionError(f"{wrong} was taken")
    try:
        client.chat.completions.create(model=name, messages=[{"role": "user", "content": "?"}])
    except openai.NotFoundError as error:
        assert "chat template" in str(error)
    try:
        openai.OpenAI(base_url=f"{address}/v1", api_key="another").models.list()
    except openai.AuthenticationError:
        print("openai: completions, streams, lists, logprobs, errors")
        return
    raise AssertionError("another key was taken")


def harness(address: str, folder: pathlib.Path, samples: pathlib.Path) -> dict[str, float]:
    """A task that generates, with the harness's own BABILong scoring, and one that compares likelihoods."""
    import lm_eval.tasks.babilong as babilong

    scoring = pathlib.Path(babilong.__path__[0]) / "common_utils.py"
    (folder / "scoring.py").write_text(re.sub(r"^from transformers.*$", "AutoTokenizer = None", scoring.read_text(), flags=re.M))
    data = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {samples}\ntest_split: test\nnum_fewshot: 0\n"
    text = 'doc_to_text: "{{input}}{{question}}GEN"\n'
    (folder / "generate.yaml").write_text(
        f"task: armt_babilong\n{data}{text}output_type: generate_until\ndoc_to_target: '{{{{target}}}}'\n"
        "process_results: !function scoring.process_results\nmetric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
        "generation_kwargs:\n  do_sample: false\n  temperature: 0.0\n  max_gen_toks: 10\n  until: ['<|endoftext|>']\n"
    )
    (folder / "choose.yaml").write_text(
        f"task: armt_rooms\n{data}{text}output_type: multiple_choice\ndoc_to_choice: {json.dumps(ROOMS)}\n"
        f"doc_to_target: '{{{{{json.dumps(ROOMS)}.index(target)}}}}'\ntarget_delimiter: ''\n"
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    arguments = f"model=babilong-qa1,base_url={address}/v1/completions,tokenizer_backend=remote,tokenized_requests=True,num_concurrent=2,max_length=1000000"
    words = ["--model", "local-completions", "--model_args", arguments, "--tasks", "armt_babilong,armt_rooms", "--include_path", str(folder), "--output_path", str(folder / "out")]
    run = subprocess.run([sys.executable, "-m", "lm_eval", *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    [report] = (folder / "out").rglob("results*.json")
    results = json.loads(report.read_text())["results"]
    return {task: results[task]["acc,none"] for task in ["armt_babilong", "armt_rooms"]}


def main(armt: str) -> None:
    run = lambda *words: subprocess.run([armt, *map(str, words)], check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        samples, report, keys = folder / "samples.jsonl", folder / "report.json", folder / "keys"
        run("data", "babilong", "--questions", "qa1", "--lengths", "1k", "--samples", "40", "--out", samples)
        run("eval", MODEL, "--task", "babilong", "--file", samples, "--device", "cpu", "--out", report)
        own = json.loads(report.read_text())["cells"][0]["exact_match"]
        keys.write_text(os.environ["OPENAI_API_KEY"] + "\n")
        with serving(armt, "--api-key-file", keys) as address:
            openai_package(address)
        # The harness's own tokenizer sends no key.
        with serving(armt) as address:
            rates = harness(address, folder, samples)
        assert abs(rates["armt_babilong"] - own) < 1e-9, f"{rates} from the harness, {own} from armt eval"
        assert rates["armt_rooms"] >= own - 0.05, rates
        print(f"lm-evaluation-harness: {rates}, armt eval {own}")


@contextlib.contextmanager
def serving(armt: str, *more):
    server = subprocess.Popen([armt, "serve", MODEL, "--port", "0", "--device", "cpu", *map(str, more)], stdout=subprocess.PIPE, text=True)
    try:
        yield re.search(r"http://\S+", server.stdout.readline()).group(0)
    finally:
        server.terminate()
        assert server.wait() == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
