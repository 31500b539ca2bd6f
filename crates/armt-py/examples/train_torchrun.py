"""Training in several processes, started by torchrun (or Slurm's srun, or anything that sets torchrun's environment variables):

    torchrun --nproc-per-node 2 train_torchrun.py remember-armt runs/remember

Each process computes its part of every batch, and gradients are added up by Gloo on CPUs and by NCCL on GPUs, unless --backend names one. Which texts are drawn does not depend
on the number of processes. A run that is there is gone on with, by any number of processes.
"""

import argparse
import json
from pathlib import Path

import armt
from armt.distributed import torch_replica


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("recipe", help="a TOML file, or the name of a recipe that comes with the package")
    arguments.add_argument("out", type=Path, help="the run's folder, which all processes must see")
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the recipe; VALUE is JSON")
    arguments.add_argument("--steps", type=int, help="stop, and save, after so many")
    arguments.add_argument("--timeout", type=float, default=300, help="seconds to wait for the other processes")
    arguments.add_argument("--backend", choices=["gloo", "nccl"], help="what adds up gradients: NCCL where torch finds CUDA, if not given")
    arguments.add_argument("--device", help="where to compute; with --backend gloo processes may share a GPU (cuda:0)")
    given = arguments.parse_args()
    changes = {key: json.loads(value) for key, value in (change.split("=", 1) for change in given.set)}
    replica = torch_replica(given.backend, device=given.device, timeout=given.timeout)
    resume = (given.out / "last").is_dir()

    def tell(record):
        if replica["rank"] == 0 and record["event"] == "validation":
            print(record, flush=True)

    trainer = armt.Trainer(given.recipe, given.out, changes=changes, callbacks=[tell], resume=resume, max_steps=given.steps, **replica)
    measured = trainer.fit()
    if replica["rank"] == 0:
        print(f"finished: {measured}" if measured else "stopped and saved; the same command goes on")


if __name__ == "__main__":
    main()
