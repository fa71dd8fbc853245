"""What torch and Megatron-Core raise over a damaged checkpoint, as one error that names its folder."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from pipeline.errors import CorruptCheckpointError
from precision.text.short import one_line

_RAISED = (CheckpointingException, OSError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError)


@contextmanager
def damage_as(message: Callable[[str], str]) -> Iterator[None]:
    """Raises CorruptCheckpointError for damage that is met while a checkpoint is loaded; `message` is given why."""
    try:
        yield
    except CheckpointException as error:  # a BaseException, with what each rank met
        met = next(iter(error.failures.values()))[0]
        raise CorruptCheckpointError(message(one_line(met, 300))) from error
    except _RAISED as error:
        raise CorruptCheckpointError(message(one_line(error, 300))) from error
