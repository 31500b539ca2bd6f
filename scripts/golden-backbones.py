#!/usr/bin/env python3
"""Golden cases of backbones: tiny random models as `transformers` saves them, with its logits and greedy tokens.

    pip install torch transformers safetensors
    python scripts/golden-backbones.py tests/fixtures/backbones

A case is a model folder with golden.safetensors (tokens, logits, greedy) beside the model's own files.
"""

import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

KIN = dict(vocab_size=41, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
           num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.4)
ROPE = dict(rope_theta=500.0)
CASES = {
    "llama-linear": ("llama", dict(rope_parameters=dict(rope_type="linear", factor=4.0, **ROPE))),
    "llama-yarn": ("llama", dict(rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, **ROPE))),
    "llama-llama3": ("llama", dict(attention_bias=True, mlp_bias=True, rope_parameters=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16, **ROPE))),
    "mistral": ("mistral", dict(head_dim=6, sliding_window=48, tie_word_embeddings=False)),
    "mistral-tied-shards": ("mistral", dict(sliding_window=None, tie_word_embeddings=True)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=False)),
    "qwen2-tied-bf16": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", dict(head_dim=8, tie_word_embeddings=False)),
    "qwen3-tied-bf16": ("qwen3", dict(head_dim=6, attention_bias=True, tie_word_embeddings=True)),
}


def main(out: pathlib.Path) -> None:
    for seed, (name, (kind, keys)) in enumerate(CASES.items()):
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        torch.manual_seed(seed)
        config = AutoConfig.for_model(kind, **{**KIN, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, **keys})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                # Norms and biases begin as ones and zeros, which hide errors.
                if parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        if name.endswith("bf16"):
            model = model.to(torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="12KB" if name.endswith("shards") else "1GB")
        # Loaded anew and not cast: that would round the rotary frequencies too.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        tokens = torch.randint(3, KIN["vocab_size"], (2, 19))
        with torch.no_grad():
            logits = model(tokens).logits
            greedy = tokens
            for _ in range(12):
                greedy = torch.cat([greedy, model(greedy).logits[:, -1:].argmax(-1)], 1)
        save_file({"tokens": tokens.int(), "logits": logits, "greedy": greedy[:, tokens.shape[1]:].int().contiguous()},
                  folder / "golden.safetensors")
        (folder / "generation_config.json").unlink(missing_ok=True)
        print(name, json.loads((folder / "config.json").read_text()).get("rope_parameters"))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
