#!/usr/bin/env python3
"""Golden cases of GGUF: a file with a tensor of each type, with the values that the `gguf` package has for it, and whole models with the logits
of `transformers` on the same weights.

    pip install torch transformers safetensors gguf
    python scripts/golden-gguf.py tests/fixtures/gguf data/books-bpe/tokenizer.json
"""

import json
import pathlib
import sys

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

TYPES = [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q4_K, Q.Q6_K]


def types(out: pathlib.Path) -> None:
    """Random blocks: every bit of the scales, minima and values is used."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(out / "types.gguf", "llama")
    for key, value in [("block_count", 1), ("context_length", 64), ("embedding_length", 32), ("feed_forward_length", 32)]:
        getattr(writer, f"add_{key}")(value)
    writer.add_head_count(4)
    values = {}
    names = ["token_embd", "output", "output_norm", "blk.0.attn_v", "blk.0.attn_output", "blk.0.ffn_gate", "blk.0.ffn_up", "blk.0.ffn_down"]
    for name, kind in zip(names, TYPES):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if kind in (Q.F32, Q.F16, Q.BF16):
            data = gguf.quants.quantize(random.normal(size=(2, 32)).astype(np.float32), kind)
        else:
            data = random.integers(0, 256, size=(2, 512 // block * size), dtype=np.uint8)
            # Scales that are finite numbers: f16 of a middling exponent.
            flat = data.reshape(-1, size)
            at = [208] if kind == Q.Q6_K else [0, 2] if kind in (Q.Q4_1, Q.Q4_K) else [0]
            for a in at:
                flat[:, a + 1] = (flat[:, a + 1] & 0x87) | 0x28
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
        values[f"{name}.weight"] = gguf.quants.dequantize(data, kind).astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(values, out / "types.safetensors")


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of queries and keys."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


PARTS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def renamed(name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, *part, end = name.split(".")
    return f"blk.{layer}.{PARTS['.'.join(part)]}.{end}"


def model(out: pathlib.Path, name: str, kind: str, stored: Q, tied: bool, tokenizer: dict) -> None:
    torch.manual_seed(3)
    tokens = sorted(tokenizer["model"]["vocab"].items(), key=lambda t: t[1])
    heads, keys = 4, 2
    config = AutoConfig.for_model(kind, vocab_size=len(tokens), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                  num_attention_heads=heads, num_key_value_heads=keys, head_dim=8, max_position_embeddings=128,
                                  rms_norm_eps=1e-5, initializer_range=0.3, tie_word_embeddings=tied,
                                  rope_parameters=dict(rope_type="default", rope_theta=10000.0), eos_token_id=0, bos_token_id=0)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    writer = gguf.GGUFWriter(out / f"{name}.gguf", kind)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_key_length(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([t for t, _ in tokens])
    writer.add_token_types([3 if t == "<|endoftext|>" else 1 for t, _ in tokens])
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    state = reference.state_dict()
    with torch.no_grad():
        for key, value in state.items():
            if key == "lm_head.weight" and tied:
                continue
            weight = value.float().numpy()
            if weight.ndim == 1:
                weight = weight + 0.3 * np.random.default_rng(len(key)).normal(size=weight.shape).astype(np.float32)
            kind_of = Q.F32 if weight.ndim == 1 else stored
            flat = np.ascontiguousarray(weight)
            if kind == "llama":
                flat = paired(flat, heads) if "q_proj" in key else paired(flat, keys) if "k_proj" in key else flat
            data = gguf.quants.quantize(np.ascontiguousarray(flat), kind_of)
            writer.add_tensor(renamed(key), data, raw_dtype=kind_of)
            # What the file says is the model: quantised row by row, so that the order of rows changes nothing.
            plain = gguf.quants.quantize(np.ascontiguousarray(weight), kind_of)
            value.copy_(torch.from_numpy(gguf.quants.dequantize(plain, kind_of).astype(np.float32).reshape(weight.shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ids = torch.randint(1, len(tokens), (2, 17))
    with torch.no_grad():
        logits = reference(ids).logits.numpy()
    save_file({"tokens": ids.int().numpy(), "logits": logits[:, -4:].copy()}, out / f"{name}.safetensors")


if __name__ == "__main__":
    out, tokenizer = pathlib.Path(sys.argv[1]), json.loads(pathlib.Path(sys.argv[2]).read_text())
    out.mkdir(parents=True, exist_ok=True)
    types(out)
    model(out, "llama-q8", "llama", Q.Q8_0, True, tokenizer)
    model(out, "qwen2-f16", "qwen2", Q.F16, False, tokenizer)
    model(out, "qwen3-q4", "qwen3", Q.Q4_1, True, tokenizer)
