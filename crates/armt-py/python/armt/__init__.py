"""Associative Recurrent Memory Transformer: a model reads a text of any length once, and what it has read is a small value to ask later.

    import armt

    model = armt.Model.from_pretrained("babilong-qa1")
    memory = model.read("Mary went to the kitchen. John moved to the garden.")
    print(model.ask(memory, "Where is Mary?"))  # kitchen
"""

import os as _os
import sysconfig as _sysconfig

# Where pip puts CUDA's libraries: an interpreter that is neither on PATH nor activated would not be found otherwise.
_packages = _sysconfig.get_path("purelib")
if "ARMT_CUDA_PATH" not in _os.environ and _os.path.isdir(_os.path.join(_packages, "nvidia")):
    _os.environ["ARMT_CUDA_PATH"] = _packages

from ._answer import Answer
from ._armt import Memory, Model, Stream, TrainableModel, __version__, get_threads, set_threads
from ._probe import Probe
from .data import Dataset
from .errors import Error, FileError, InputError, MemoryFileError, NotFoundError
from .training import Trainer

__all__ = [
    "Answer",
    "Dataset",
    "Error",
    "FileError",
    "InputError",
    "Memory",
    "MemoryFileError",
    "Model",
    "NotFoundError",
    "Probe",
    "Stream",
    "TrainableModel",
    "Trainer",
    "__version__",
    "get_threads",
    "set_threads",
]
