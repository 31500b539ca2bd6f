"""One step of training made by hand: the loss, its derivative and AdamW in numpy, the way back in armt.

The trainer draws a batch and makes a step. Here the same step is made from the same batch, with a loss that is nothing but numpy, and the
parameters come out the same: a loss of your own takes the place of `cross_entropy`.
"""

import json
import tempfile
from pathlib import Path

import armt
import numpy as np

RECIPE = {
    "seed": 1,
    "task": {"setting": "remember", "symbols": 8},
    "model": {"layers": 2, "width": 32, "heads": 2, "inner": 64},
    "memory": {"kind": "associative", "tokens": 2, "d_mem": 8},
    "optimizer": {"lr": 1e-4, "weight_decay": 1e-3, "clip_value": 1.0, "warmup": 0.0},
    "eval": {"samples": 20, "batch": 20},
    "stage": [{"pairs": 3, "batch": 8, "steps": 4}],
}


def cross_entropy(logits, targets):
    """The mean loss of the positions that are asked, and its derivative with respect to the logits."""
    asked = targets >= 0
    shifted = logits - logits.max(-1, keepdims=True)
    probabilities = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    right = np.take_along_axis(probabilities, np.maximum(targets, 0)[..., None], -1)[..., 0]
    loss = -np.log(right[asked]).mean()
    slope = probabilities - np.eye(logits.shape[-1], dtype=np.float32)[np.maximum(targets, 0)]
    return loss, slope * asked[..., None] / asked.sum()


def adamw(value, gradient, rate, decay, clip, eps=1e-8):
    """AdamW's first step: where there was no gradient before, g / (|g| + eps). Where g itself is as small as eps, its rounding decides a part of the
    step: these elements are what differs most."""
    gradient = np.clip(gradient, -clip, clip).astype(np.float64)
    return (value * (1 - rate * decay) - rate * gradient / (np.abs(gradient) + eps)).astype(np.float32)


def main(folder: Path) -> float:
    trainer = armt.Trainer(RECIPE, folder / "run", max_steps=1, device="cpu")
    model = trainer.first_model()
    ids, targets = trainer.first_batch(0)
    losses = []

    def loss(logits):
        value, slope = cross_entropy(logits, targets)
        losses.append(value)
        return slope

    gradients = model.gradients(ids, loss)
    settings = RECIPE["optimizer"]
    rate, decay, clip = settings["lr"], settings["weight_decay"], settings["clip_value"]
    model.set_parameters({name: adamw(value, gradients[name], rate, decay, clip) for name, value in model.parameters().items()})

    trainer.fit()
    first = json.loads((folder / "run/log.jsonl").read_text().splitlines()[0])
    theirs = armt.TrainableModel.from_pretrained(folder / "run/last", device="cpu").parameters()
    ours = model.parameters()
    apart = max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs)
    print(f"loss {losses[0]:.7f}, the trainer's {first['loss']:.7f}; parameters differ by {apart:.1e} at most")
    assert abs(losses[0] - first["loss"]) < 1e-6
    return apart


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        assert main(Path(folder)) < 1e-6
