#!/usr/bin/env python3
"""Mamba in plain PyTorch, the peer of `armt bench read-mamba,train-mamba`: the same shapes, bf16 products, f32 states, a text segment by segment.

    armt bench read-mamba,train-mamba --device cuda; python3 benches/mamba_torch.py             # in one run, on an idle machine
    python3 benches/mamba_torch.py --check tests/fixtures/golden-baselines/mamba_c                # its numbers against the golden data, in f32 on the CPU

The scan S_t = a_t S_{t-1} + b_t is parallel within a segment in two ways, of which the faster one that runs counts:
  chunked   chunks side by side, each from zero, token by token; then the states between chunks, and what they add to each token
  scan      PyTorch's associative_scan, which torch.compile makes one Triton kernel (CUDA, compiled, reading only)
Each is run compiled, and reading also in a CUDA graph. `products` is the time of training's matrix products alone. One line 'RESULT ..' each, or
'FAIL ..'; nothing stops the run. Needs torch alone.
"""
import argparse, json, math, statistics, struct, time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, LAYERS, STATE, CONV, VOCAB = 768, 24, 16, 4, 50280


class Shape:
    def __init__(self, width=WIDTH, layers=LAYERS, state=STATE, conv=CONV, vocab=VOCAB, inner=None, rank=None, eps=1e-5):
        self.width, self.layers, self.state, self.conv, self.vocab, self.eps = width, layers, state, conv, vocab, eps
        self.inner, self.rank = inner or 2 * width, rank or math.ceil(width / 16)


def fresh(shape, device):
    """Random weights by their names in Hugging Face's files, f32."""
    d, e, n, r = shape.width, shape.inner, shape.state, shape.rank
    uniform = lambda inputs, *size: (2 * torch.rand(*size, device=device) - 1) / math.sqrt(inputs)
    step = torch.exp(torch.rand(shape.layers, e, device=device) * math.log(100) + math.log(1e-3))
    weights = {"backbone.embeddings.weight": 0.1 * torch.randn(shape.vocab, d, device=device), "backbone.norm_f.weight": torch.ones(d, device=device)}
    for i in range(shape.layers):
        one = {
            "norm.weight": torch.ones(d, device=device),
            "mixer.in_proj.weight": uniform(d, 2 * e, d),
            "mixer.conv1d.weight": uniform(shape.conv, e, 1, shape.conv),
            "mixer.conv1d.bias": uniform(shape.conv, e),
            "mixer.x_proj.weight": uniform(e, r + 2 * n, e),
            "mixer.dt_proj.weight": uniform(r, e, r),
            "mixer.dt_proj.bias": step[i] + torch.log(-torch.expm1(-step[i])),
            "mixer.A_log": torch.arange(1, n + 1, device=device).float().log().repeat(e, 1),
            "mixer.D": torch.ones(e, device=device),
            "mixer.out_proj.weight": uniform(e, d, e),
        }
        weights |= {f"backbone.layers.{i}.{name}": tensor for name, tensor in one.items()}
    return weights


def chunked(dt, u, A, B, C, S, size=16):
    """y and the last state. dt, u [b, T, E]; A [E, N]; B, C [b, T, N]; S [b, E, N]."""
    b, T, E = u.shape
    size = min(size, T)
    more = -T % size
    if more:  # steps of zero leave the state as it is
        dt, u, B, C = (F.pad(x, (0, 0, 0, more)) for x in (dt, u, B, C))
    cut = lambda x: x.unflatten(1, (-1, size))
    a = torch.exp(cut(dt)[..., None] * A)                            # [b, chunks, size, E, N]
    w = cut(dt * u)[..., None] * cut(B)[..., None, :]
    state, decay, states, decays = torch.zeros_like(w[:, :, 0]), torch.ones_like(a[:, :, 0]), [], []
    for t in range(size):
        state, decay = a[:, :, t] * state + w[:, :, t], decay * a[:, :, t]
        states.append(state)
        decays.append(decay)
    before = []
    for c in range(a.shape[1]):
        before.append(S)
        S = decay[:, c] * S + state[:, c]
    all_states = torch.stack(states, 2) + torch.stack(decays, 2) * torch.stack(before, 1)[:, :, None]
    y = (all_states * cut(C)[..., None, :]).sum(-1).flatten(1, 2)[:, :T]
    return y, S


def scanned(dt, u, A, B, C, S):
    """The same by PyTorch's associative scan."""
    from torch._higher_order_ops.associative_scan import associative_scan

    a = torch.exp(dt[..., None] * A)                                 # [b, T, E, N]
    w = (dt * u)[..., None] * B[:, :, None, :]
    w = torch.cat([w[:, :1] + a[:, :1] * S[:, None], w[:, 1:]], 1)
    _, states = associative_scan(lambda x, y: (y[0] * x[0], y[0] * x[1] + y[1]), (a, w), dim=1, combine_mode="pointwise")
    return (states * C[:, :, None, :]).sum(-1), states[:, -1].clone()


def norm(x, w, eps):
    x = x.float()
    return w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def layer(w, shape, x, conv, S, scan, dtype):
    """One layer of a segment. x [b, T, d]; conv [b, K - 1, E], what came before; S [b, E, N]."""
    n, r, T = shape.state, shape.rank, x.shape[1]
    product = lambda x, name: F.linear(x.to(dtype), w[f"{name}.weight"].to(dtype), w[f"{name}.bias"].to(dtype) if f"{name}.bias" in w else None)
    inner, gate = product(norm(x, w["norm.weight"], shape.eps), "mixer.in_proj").chunk(2, -1)
    row = torch.cat([conv.to(dtype), inner], 1)
    kernel = w["mixer.conv1d.weight"][:, 0].to(dtype)
    u = sum(row[:, k : k + T] * kernel[:, k] for k in range(shape.conv))
    if "mixer.conv1d.bias" in w:
        u = u + w["mixer.conv1d.bias"].to(dtype)
    u = F.silu(u)
    rank, B, C = product(u, "mixer.x_proj").split([r, n, n], -1)
    dt = F.softplus(F.linear(rank.to(dtype), w["mixer.dt_proj.weight"].to(dtype)).float() + w["mixer.dt_proj.bias"])
    y, S = scan(dt, u.float(), -torch.exp(w["mixer.A_log"]), B.float(), C.float(), S)
    y = (y + w["mixer.D"] * u.float()) * F.silu(gate.float())
    return x + product(y, "mixer.out_proj"), row[:, T:].float(), S


def layers(weights, shape, x, conv, S, scan, dtype, layer=layer):
    """All layers of a segment, with the states [L, ...] after it. `layer` may be compiled: all are alike."""
    by_layer = [{} for _ in range(shape.layers)]
    for name, w in weights.items():
        if name.startswith("backbone.layers."):
            i, name = name.removeprefix("backbone.layers.").split(".", 1)
            by_layer[int(i)][name] = w
    states = []
    for w, *state in zip(by_layer, conv, S):
        x, *state = layer(w, shape, x, *state, scan, dtype)
        states.append(state)
    return x, *map(torch.stack, zip(*states))


def empty(shape, texts, device):
    conv = torch.zeros(shape.layers, texts, shape.conv - 1, shape.inner, device=device)
    return conv, torch.zeros(shape.layers, texts, shape.inner, shape.state, device=device)


def logits(weights, shape, x, dtype):
    head = weights.get("lm_head.weight", weights["backbone.embeddings.weight"])
    return F.linear(norm(x, weights["backbone.norm_f.weight"], shape.eps).to(dtype), head.to(dtype))


def timed(run, repeats):
    """Median seconds, with the GPU's work done."""
    done = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = []
    for _ in range(repeats):
        done()
        start = time.perf_counter()
        run()
        done()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def reading(scan, graph, args):
    """Tokens a second of one text of so many segments, in their states alone."""
    shape, dtype = Shape(layers=args.layers), torch.bfloat16 if args.device == "cuda" else torch.float32
    weights = fresh(shape, args.device)
    ids = torch.randint(shape.vocab, (args.segments, args.texts, args.segment), device=args.device)
    # What a product takes is rounded once.
    products = {name: w.to(dtype) if "proj.weight" in name or "embeddings" in name else w for name, w in weights.items()}

    compiled = torch.compile(layer, dynamic=False)

    def segment(ids, conv, S):
        x = F.embedding(ids, products["backbone.embeddings.weight"])
        return layers(products, shape, x, conv, S, scan, dtype, compiled)[1:]

    with torch.no_grad():
        conv, S = empty(shape, args.texts, args.device)
        step = lambda tokens: [old.copy_(new) for old, new in zip((conv, S), segment(tokens, conv, S))]
        for _ in range(3):
            step(ids[0])
        if graph:
            given, recorded = ids[0].clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                step(given)
            step = lambda tokens: (given.copy_(tokens), recorded.replay())
        seconds = timed(lambda: [step(tokens) for tokens in ids], args.repeats)
    assert S.isfinite().all()
    return f"{ids.numel() / seconds:,.0f} tokens/s"


def training(scan, args):
    """A step on whole texts: forward, backward, AdamW."""
    shape, dtype = Shape(layers=args.layers), torch.bfloat16 if args.device == "cuda" else torch.float32
    weights = {name: w.requires_grad_() for name, w in fresh(shape, args.device).items()}
    ids = torch.randint(shape.vocab, (args.train_texts, args.train_tokens), device=args.device)
    states = empty(shape, args.train_texts, args.device)
    # Scans are computed again on the way back: [b, T, E, N] of all layers would not fit.
    again = lambda *inputs: checkpoint(scan, *inputs, use_reentrant=False)
    compiled = torch.compile(layer, dynamic=False)
    score = torch.compile(
        lambda x, ids: F.cross_entropy(logits(weights, shape, x[:, :-1], dtype).float().flatten(0, 1), ids[:, 1:].flatten()), dynamic=False
    )

    def loss():
        x = F.embedding(ids, weights["backbone.embeddings.weight"])
        return score(layers(weights, shape, x, *states, again, dtype, compiled)[0], ids)

    optimizer = torch.optim.AdamW(weights.values(), lr=1e-4, fused=args.device == "cuda")

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    step(), step()
    return f"{1000 * timed(step, args.repeats):.1f} ms/step"


def products(args):
    """The matrix products of such a step, there and back, and nothing else."""
    shape, dtype = Shape(layers=args.layers), torch.bfloat16 if args.device == "cuda" else torch.float32
    d, e, n, r, rows = shape.width, shape.inner, shape.state, shape.rank, args.train_texts * args.train_tokens
    sizes = [(d, 2 * e, shape.layers), (e, r + 2 * n, shape.layers), (r, e, shape.layers), (e, d, shape.layers), (d, shape.vocab, 1)]
    total = 0.0
    for inputs, outputs, times in sizes:
        x, w, dy = (torch.randn(*size, device=args.device, dtype=dtype) for size in [(rows, inputs), (outputs, inputs), (rows, outputs)])

        def run():
            x @ w.T, dy @ w, dy.T @ x

        run()
        total += times * timed(run, args.repeats)
    return f"{1000 * total:.1f} ms"


def check(folder):
    """Logits of the golden data, in one piece and in segments of 7 tokens: the largest differences."""
    read = lambda path: tensors((folder / path).read_bytes())
    weights, data, config = read("model.safetensors"), read("io.safetensors"), json.loads((folder / "config.json").read_text())
    shape = Shape(config["hidden_size"], config["num_hidden_layers"], config["state_size"], config["conv_kernel"], config["vocab_size"],
                  config["intermediate_size"], config["time_step_rank"], config["layer_norm_epsilon"])
    ids = data["input_ids"]
    for tokens in (ids.shape[1], 7):
        state, found = empty(shape, ids.shape[0], "cpu"), []
        for part in ids.split(tokens, 1):
            x, *state = layers(weights, shape, weights["backbone.embeddings.weight"][part], *state, chunked, torch.float32)
            found.append(logits(weights, shape, x, torch.float32))
        off = (torch.cat(found, 1) - data["logits"]).abs().max().item()
        print(f"segments of {tokens} tokens: logits differ by {off:.1e}")
        assert off < 1e-4


def tensors(data):
    """The tensors of a safetensors file."""
    size = struct.unpack("<Q", data[:8])[0]
    types = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64}
    header = {name: entry for name, entry in json.loads(data[8 : 8 + size]).items() if name != "__metadata__"}
    piece = lambda entry: bytearray(data[8 + size + entry["data_offsets"][0] : 8 + size + entry["data_offsets"][1]])
    return {name: torch.frombuffer(piece(entry), dtype=types[entry["dtype"]]).view(entry["shape"]) for name, entry in header.items()}


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", type=Path, metavar="FOLDER", help="compare with golden data, and end")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--repeats", type=int, default=5)
    for name, value in {"layers": LAYERS, "texts": 1, "segments": 200, "segment": 512, "train-texts": 8, "train-tokens": 2048}.items():
        arguments.add_argument(f"--{name}", type=int, default=value)
    args = arguments.parse_args()
    torch.manual_seed(0)
    if args.check:
        return check(args.check)
    cuda = args.device == "cuda"
    runs = [("read, chunked, compiled", lambda: reading(chunked, False, args))]
    if cuda:
        runs.append(("read, chunked, compiled, in a graph", lambda: reading(chunked, True, args)))
        runs.append(("read, scan, compiled, in a graph", lambda: reading(scanned, True, args)))
    runs.append(("train, chunked, compiled", lambda: training(chunked, args)))
    runs.append(("train's products alone", lambda: products(args)))
    for name, run in runs:
        try:
            print(f"RESULT {name}: {run()}", flush=True)
        except Exception as error:
            print(f"FAIL {name}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
        torch.compiler.reset()
        if cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
