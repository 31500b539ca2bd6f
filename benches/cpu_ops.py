#!/usr/bin/env python3
"""CPU operations beside PyTorch: the same sizes, 2 threads each, alternating rounds on one machine.

    cargo build --release -p armt-engine --example cpu_ops
    python3 benches/cpu_ops.py target/release/examples/cpu_ops

Prints our time, PyTorch's, and PyTorch's time over ours (1 = as fast, 0.75 = a third slower). Needs torch.
"""
import os, statistics, subprocess, sys, time

THREADS = 2
ROUNDS = 3
os.environ["RAYON_NUM_THREADS"] = str(THREADS)
import torch
import torch.nn.functional as F

torch.set_num_threads(THREADS)
torch.manual_seed(0)


def timed(f):
    t = time.perf_counter()
    f()
    rounds = max(1, int(0.02 / max(time.perf_counter() - t, 1e-7)))
    times = []
    for _ in range(7):
        t = time.perf_counter()
        for _ in range(rounds):
            f()
        times.append((time.perf_counter() - t) / rounds)
    return statistics.median(times) * 1e6


def both(f, *inputs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    dy = torch.randn_like(f(*inputs))

    def run():
        for x in inputs:
            x.grad = None
        f(*inputs).backward(dy)
    return timed(run)


def peer(name):
    """PyTorch's time for one of our names."""
    kind, _, size = name.rpartition("_")
    dims = [int(s) for s in size.split("x")]
    with torch.no_grad():
        if kind in ("matmul", "matmul_tn", "matmul_nt"):
            g, m, k, n = dims
            a = torch.randn(g, k, m).transpose(1, 2) if kind == "matmul_tn" else torch.randn(g, m, k)
            b = torch.randn(g, n, k).transpose(1, 2) if kind == "matmul_nt" else torch.randn(g, k, n)
            if g == 1:
                a, b = a[0], b[0]
            return timed(lambda: a @ b)
        x, y = torch.randn(dims), torch.randn(dims)
        d = dims[-1]
        gain, bias = torch.randn(d), torch.randn(d)
        plain = {
            "add": lambda: x + y, "mul": lambda: x * y, "gelu": lambda: F.gelu(x, approximate="tanh"), "gelu_erf": lambda: F.gelu(x),
            "silu": lambda: F.silu(x), "sigmoid": lambda: torch.sigmoid(x), "relu": lambda: F.relu(x), "sum": lambda: x.sum(0),
            "softmax": lambda: F.softmax(x, -1), "layer_norm": lambda: F.layer_norm(x, (d,), gain, bias),
            "rms_norm": lambda: F.rms_norm(x, (d,), gain),
        }
        if kind in plain:
            return timed(plain[kind])
        if kind == "attention":
            n, h, t, s = dims
            q, k, v = (torch.randn(n, h, t, s) for _ in range(3))
            return timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    if kind == "attention_both":
        n, h, t, s = dims
        q, k, v = (torch.randn(n, h, t, s) for _ in range(3))
        return both(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
    grads = {
        "gelu_both": lambda: both(lambda x: F.gelu(x, approximate="tanh"), x),
        "softmax_both": lambda: both(lambda x: F.softmax(x, -1), x),
        "layer_norm_both": lambda: both(lambda x, g, b: F.layer_norm(x, (d,), g, b), x, gain, bias),
        "rms_norm_both": lambda: both(lambda x, g: F.rms_norm(x, (d,), g), x, gain),
    }
    return grads[kind]()


def main():
    ours, theirs = {}, {}
    for _ in range(ROUNDS):
        for line in subprocess.run(sys.argv[1:], check=True, capture_output=True, text=True).stdout.splitlines():
            name, us = line.split()
            ours.setdefault(name, []).append(float(us))
        for name in ours:
            theirs.setdefault(name, []).append(peer(name))
    print(f"torch {torch.__version__}, {THREADS} threads, load {os.getloadavg()[0]:.1f}\n")
    print("| operation | ours, us | PyTorch, us | ratio |\n|---|---|---|---|")
    worst = {}
    for name in ours:
        a, b = statistics.median(ours[name]), statistics.median(theirs[name])
        group = "matmul" if name.startswith("matmul") else "others"
        worst[group] = min(worst.get(group, 9e9), b / a)
        print(f"| {name} | {a:.1f} | {b:.1f} | {b / a:.2f} |")
    print(f"\nleast ratio: {', '.join(f'{g} {r:.2f}' for g, r in worst.items())}")


if __name__ == "__main__":
    main()
