"""Define the exception tree.

EvenKeelError
├── FatalError                 the same input fails again, so the supervisor stops
│   ├── RecipeError            an unknown key, a bad value, or contradictory keys
│   ├── ModelError             a checkpoint folder, its tokenizer or its shapes cannot be used
│   ├── MachineError           this machine lacks a package, a GPU or a writable folder that the recipe needs
│   ├── LayoutError            parallel sizes that do not divide the model or the machine
│   ├── RunConflictError       resumed with another recipe, or the run is already being trained
│   ├── StoreError             a file of the run directory is missing, damaged or foreign
│   │   ├── CorruptBatchError
│   │   └── CorruptCheckpointError
│   ├── DiskFullError          a disk is full, or too full for the next write
│   ├── RewardError            the reward function fails, or rejects the task's own answers
│   ├── ExpertReplayError      recorded routes do not fit the model, or were not used exactly once
│   ├── NonFiniteError         a NaN or infinity was about to reach the optimizer
│   ├── SupersededError        a later start of the same role has taken over
│   ├── PortInUseError
│   └── EngineStartError       an engine never came up (carries the end of its log)
├── StoppedError               stopped on request before the end of the run, which can be resumed
└── RetryableError             the same call may succeed later
      ├── EngineUnavailableError an engine refused, dropped or never answered a request
      │   ├── BadAnswerError     an engine gave an impossible answer
      │   ├── RequestFailedError an engine failed this request with an error status
      │   └── EngineHungError    an engine's server hangs, and its role ends it
      ├── EngineVersionError     an engine does not serve the required version
      └── DeadlineExceededError  a bounded wait ran out

Every message names in one line the expectation, the finding, and the next action.
"""

from __future__ import annotations

from precision.text import MESSAGE_CHARACTERS, one_line

FATAL_EXIT_CODE = 64
"""Exit status of a process that met a FatalError: the run has failed and must not be restarted."""
SUPERSEDED_EXIT_CODE = 65
"""Exit status of a process superseded by a later start of its role: the run goes on, without this process."""
STOPPED_EXIT_CODE = 143
"""Exit status of a role stopped by SIGTERM before the run was finished: restarted, it goes on."""


class EvenKeelError(Exception):
    """The root of this project's errors; their text is one printable line of at most 2,000 characters."""

    def __str__(self) -> str:
        return one_line(super().__str__(), MESSAGE_CHARACTERS)


class FatalError(EvenKeelError):
    """An error that the same input causes again."""


class RecipeError(FatalError):
    """The recipe is wrong; the message names the key, its value and the allowed values."""


class ModelError(FatalError):
    """A model folder, its tokenizer or its shapes cannot be used."""


class MachineError(FatalError):
    """This machine lacks a package, a GPU or a writable folder that the recipe needs."""


class LayoutError(FatalError):
    """The parallel layout does not fit the model or the number of processes."""


class RunConflictError(FatalError):
    """The run directory belongs to another recipe, or another process is training it."""


class StoreError(FatalError):
    """A file of the run directory is missing, damaged or foreign; the message names it."""


class CorruptBatchError(StoreError):
    """A batch file failed its checks (truncated, flipped bit, missing array)."""


class CorruptCheckpointError(StoreError):
    """A checkpoint has no COMMIT or fails its checks."""


class DiskFullError(FatalError):
    """A disk is full, or too full for the next write. Committed files stay."""


class RewardError(FatalError):
    """The reward function fails on too many samples, or rejects the task's own answers."""


class ExpertReplayError(FatalError):
    """Routed experts of a batch do not fit the model, or a pass did not use each exactly once."""


class NonFiniteError(FatalError, FloatingPointError):
    """A NaN or infinity was about to reach the optimizer."""


class SupersededError(FatalError):
    """A later start of the same role has taken over; this process must not write any more."""


class PortInUseError(FatalError):
    """A port that the recipe names is taken by another process."""


class EngineStartError(FatalError):
    """An engine did not come up before its deadline."""


class StoppedError(EvenKeelError):
    """The process stopped in order on request, with its state saved."""


class RetryableError(EvenKeelError):
    """An error that the same call may not meet later."""


class EngineUnavailableError(RetryableError):
    """An engine refused, dropped or never answered a request."""


class BadAnswerError(EngineUnavailableError):
    """An engine gave an impossible answer, so it is faulty even if it seems healthy."""


class RequestFailedError(EngineUnavailableError):
    """A server failed one request with a 5xx status; other requests may succeed."""


class EngineHungError(EngineUnavailableError):
    """An engine's server hangs, so no further request is sent to it."""


class EngineVersionError(RetryableError):
    """An engine does not serve the required policy version."""


class DeadlineExceededError(RetryableError):
    """A bounded wait ran out."""
