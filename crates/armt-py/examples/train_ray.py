"""Training in several workers of Ray Train, which starts a worker that dies anew: the run then goes on from its last checkpoint.

    python train_ray.py remember-armt runs/remember --workers 2
"""

import argparse
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def work(settings):
    import armt
    from armt.distributed import torch_replica

    out = Path(settings["out"])
    resume = (out / "last").is_dir()
    armt.set_threads(1)
    callbacks = settings.get("callbacks", [])
    armt.Trainer(settings["recipe"], out, resume=resume, callbacks=callbacks, **torch_replica()).fit()


def fit(recipe, out, workers=2, callbacks=(), failures=3, gpus=False, storage=None):
    """Trains by a recipe, as `armt.Trainer` takes it."""
    if not isinstance(recipe, dict) and Path(recipe).exists():
        # Workers begin in a folder of their own.
        recipe = str(Path(recipe).absolute())
    trainer = TorchTrainer(
        work,
        train_loop_config={"recipe": recipe, "out": str(Path(out).absolute()), "callbacks": list(callbacks)},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus),
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo", timeout_s=60),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=failures), storage_path=storage),
    )
    return trainer.fit()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("recipe", help="a TOML file, or the name of a recipe that comes with the package")
    arguments.add_argument("out", help="the run's folder, which all workers must see")
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--gpus", action="store_true", help="a GPU for each worker")
    given = arguments.parse_args()
    ray.init()
    fit(given.recipe, given.out, given.workers, gpus=given.gpus)
