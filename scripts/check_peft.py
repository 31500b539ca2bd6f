"""Adapters that `armt train` writes, opened by peft on the plain backbone, against `armt merge` and `armt export`; and what peft writes, by the way
that `armt` names for it: merged in Python and converted."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import warnings

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "data/books-bpe/tokenizer.json"
VOCAB = len(json.loads(TOKENIZER.read_text())["model"]["vocab"])
SIZES = dict(vocab_size=VOCAB, initializer_range=0.2, bos_token_id=0, eos_token_id=0)
WIDE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128)
CASES = {
    "llama": (dict(num_key_value_heads=2, tie_word_embeddings=True, **WIDE), ["q_proj", "v_proj"]),
    "gpt2": (dict(n_embd=32, n_layer=2, n_head=4, n_positions=128), ["c_attn", "mlp.c_proj"]),
    "gpt_neox": (WIDE, ["query_key_value", "dense"]),
}
RECIPE = """seed = 1
[task]
setting = "text"
train = ["text.txt"]
valid = ["text.txt"]
[model]
from = "base"
[train]
lora = {{ rank = 3, alpha = 7, targets = {targets} }}
[optimizer]
lr = 1e-2
[eval]
every = 5
samples = 2
batch = 2
[[stage]]
segment = 32
segments = 2
batch = 2
steps = 5
until = "never"
"""
MOST = 1e-6
LOGITS = 5e-5


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of tensors under one name; those of one side alone are refused."""
    assert ours.keys() == theirs.keys(), f"of one side alone: {sorted(ours.keys() ^ theirs.keys())}"
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def check(armt: pathlib.Path, kind: str, folder: pathlib.Path) -> None:
    sizes, targets = CASES[kind]

    def run(*words: str, good: bool = True) -> str:
        done = subprocess.run([armt, *words], cwd=folder, capture_output=True, text=True)
        assert (done.returncode == 0) == good, f"armt {' '.join(words)}: {done.stderr}"
        return done.stderr

    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **sizes)).save_pretrained(folder / "plain")
    shutil.copy(TOKENIZER, folder / "plain")
    (folder / "text.txt").write_text("".join(f"The {i} of all numbers was found where it had been before. " for i in range(99)))
    (folder / "recipe.toml").write_text(RECIPE.format(targets=json.dumps(targets)))
    run("convert", "plain", "base", "--kind", "associative", "--tokens", "4", "--d-mem", "8", "--segment", "32")
    run("train", "recipe.toml", "--out", "run", "--device", "cpu")
    run("merge", "base", "run/adapter", "merged")
    run("export", "merged", "export")

    # From ours to peft.
    plain = AutoModelForCausalLM.from_pretrained(folder / "plain").eval()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    with warnings.catch_warnings():
        # A key that peft does not know: ours. The memory's tensors it passes over.
        warnings.filterwarnings("ignore", message=r"Unexpected keyword arguments \['armt'\]")
        adapted = PeftModel.from_pretrained(plain, folder / "run/adapter").eval()
    ours = AutoModelForCausalLM.from_pretrained(folder / "export").eval()
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        logits = (adapted(ids).logits - ours(ids).logits).abs().max().item()
    merged = adapted.merge_and_unload().state_dict()
    moved = {name for name, value in merged.items() if not torch.equal(value, before[name])}
    named = {name for name in merged if any(name.endswith(f".{target}.weight") for target in targets)}
    assert moved == named, f"expected {sorted(named)} to change, got {sorted(moved)}"
    off = difference(ours.state_dict(), merged)
    print(f"{kind}: weights that peft and we merge differ by at most {off:.2g} (moved by up to {difference(before, merged):.2g}), logits by {logits:.2g}")
    assert off <= MOST and logits <= LOGITS

    # From peft to ours.
    config = LoraConfig(r=3, lora_alpha=7, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False, fan_in_fan_out=kind == "gpt2")
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "plain"), config)
    theirs.save_pretrained(folder / "theirs")
    said = run("read", "base", "text.txt", "--adapter", "theirs", "--memory", "text.mem", "--device", "cpu", good=False)
    assert "adapter of peft" in said and "merge_and_unload" in said, said
    merged = theirs.merge_and_unload()
    merged.save_pretrained(folder / "theirs-merged")
    shutil.copy(TOKENIZER, folder / "theirs-merged")
    run("convert", "theirs-merged", "theirs-base", "--tokens", "4", "--d-mem", "8", "--segment", "32")
    run("read", "theirs-base", "text.txt", "--memory", "text.mem", "--device", "cpu")
    run("export", "theirs-base", "theirs-export")
    off = difference(AutoModelForCausalLM.from_pretrained(folder / "theirs-export").state_dict(), merged.state_dict())
    print(f"{kind}: an adapter of peft is refused; merged by peft and converted, weights differ by at most {off:.2g}")
    assert off == 0


def main() -> None:
    armt = pathlib.Path(sys.argv[1])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for kind in CASES:
        with tempfile.TemporaryDirectory() as folder:
            check(armt, kind, pathlib.Path(folder))


if __name__ == "__main__":
    main()
