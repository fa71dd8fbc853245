"""What torch and Megatron-Core raise over a damaged checkpoint, as one error that names its folder.

What a machine or another rank raised passes through: it says nothing about what was written, and the next start may
load it. A rank that is killed meanwhile shows on the others as gloo's RuntimeError.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from pipeline.data.files import machine_failure
from pipeline.errors import CorruptCheckpointError
from precision.text import one_line

_OF_DAMAGE = (CheckpointingException, OSError, KeyError, EOFError, pickle.UnpicklingError)
_SAID_OF_DAMAGE = ("PytorchStreamReader", "corrupt", "size mismatch")
"""By a RuntimeError of torch.load, or of load_state_dict."""
_SHORT = (MemoryError, torch.OutOfMemoryError)


@contextmanager
def damage_as(message: Callable[[str], str]) -> Iterator[None]:
    """Raises CorruptCheckpointError for damage that is met while a checkpoint is loaded; `message` is given why."""
    try:
        yield
    except CheckpointException as error:  # a BaseException, with what each rank met while it read
        met = [failure for failure, _ in error.failures.values()]
        if blameless := [one for one in met if _is_blameless(one)]:
            raise blameless[0] from error
        raise CorruptCheckpointError(message(one_line(met[0], 300))) from error
    except _OF_DAMAGE as error:
        if _is_blameless(error):
            raise
        raise CorruptCheckpointError(message(one_line(error, 300))) from error
    except RuntimeError as error:
        if not any(said in str(error) for said in _SAID_OF_DAMAGE):
            raise
        raise CorruptCheckpointError(message(one_line(error, 300))) from error


def _is_blameless(error: BaseException) -> bool:
    """Whether a machine made the error, and not what was written."""
    return isinstance(error, _SHORT) or "CUDA error" in str(error) or machine_failure(error) is not None
