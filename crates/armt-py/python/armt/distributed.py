"""Training in several processes over torch.distributed, as torchrun, Slurm and Ray Train start them.

    # train.py, started by: torchrun --nproc-per-node 2 train.py
    import armt
    from armt.distributed import torch_replica

    armt.Trainer("remember-armt", "runs/remember", **torch_replica()).fit()

The gradient of a whole step is one flat array, which is added up once a step: on CPUs by Gloo, on GPUs by NCCL over a copy on the GPU. A process
that dies makes the others fail, at once or after `timeout`.
"""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def _take_slurms_place() -> None:
    """Sets torchrun's variables by those of a step of Slurm's `srun`, where they are not there. Where the processes meet is MASTER_ADDR, which
    only those of one machine can do without."""
    slurms = {"WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID"}
    if any(name in os.environ for name in ("WORLD_SIZE", "RANK")) or not all(name in os.environ for name in slurms.values()):
        return
    os.environ.update({name: os.environ[slurm] for name, slurm in slurms.items()})
    os.environ.setdefault("MASTER_PORT", "29500")
    if os.environ.get("SLURM_STEP_NUM_NODES") == "1":
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def torch_replica(backend: str | None = None, *, device: str | None = None, timeout: float = 300.0) -> dict[str, Any]:
    """What `Trainer` is told of the processes: rank, world, all_reduce, and the device of this one. Joins the process group by torchrun's
    environment variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK), or those of a step of Slurm's (SLURM_PROCID,
    SLURM_STEP_NUM_TASKS, SLURM_LOCALID, and MASTER_ADDR on several machines), unless that is done already, as Ray Train does it.

    `backend` is gloo, or nccl where torch finds CUDA. `device` is where the model computes: with nccl the process's GPU, with gloo the CPU, unless
    it is named. `timeout` is in seconds."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        _take_slurms_place()
        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        if backend == "nccl":
            # Whoever gives each process a GPU of its own shows it that one alone.
            torch.cuda.set_device(0 if torch.cuda.device_count() == 1 else int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        # Gloo's threads abort a process that ends before they do.
        atexit.register(_leave)
    nccl = dist.get_backend() == "nccl"
    place = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def all_reduce(gradient: NDArray[np.float32]) -> None:
        own = torch.from_numpy(gradient)
        added = own.to(place)
        dist.all_reduce(added)
        if added is not own:
            own.copy_(added)

    return {"rank": dist.get_rank(), "world": dist.get_world_size(), "all_reduce": all_reduce, "device": device or str(place)}
