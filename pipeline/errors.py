"""The one exception tree.

EvenKeelError
├── FatalError                 starting again with the same input fails again: the supervisor stops
│   ├── RecipeError            unknown key, bad value, keys that contradict one another
│   ├── ModelError             a checkpoint folder, its tokenizer or its shapes cannot be used
│   ├── MachineError           this machine lacks what the recipe asks for: a package, a GPU, a folder to write in
│   ├── LayoutError            parallel sizes that do not divide the model or the machine
│   ├── RunConflictError       resumed with another recipe, or the run is already being trained
│   ├── StoreError             a file of the run directory is missing, damaged or foreign
│   │   ├── CorruptBatchError
│   │   ├── CorruptCheckpointError
│   │   └── ContractMismatchError   the batch was sampled under another logprob contract
│   ├── DiskFullError          a disk is full, or too full for what is to be written
│   ├── PromptsExhaustedError  every problem of the task is solved: nothing is left to ask
│   ├── RewardError            the reward function fails, or does not accept the task's own answers
│   ├── ExpertReplayError      recorded routes do not fit the model, or were not used exactly once
│   ├── NonFiniteError         a NaN or infinity was about to reach the optimizer
│   ├── SupersededError        a later start of the same role has taken over
│   ├── PortInUseError
│   └── EngineStartError       an engine never came up (carries the end of its log)
├── StoppedError               asked to end before the run was finished; started again, it goes on
└── RetryableError             the same call may succeed later
    ├── EngineUnavailableError an engine refused, dropped or never answered a request
    │   ├── BadAnswerError     it answered, but something that cannot be
    │   ├── RequestFailedError it ended this request with an error of its own
    │   └── EngineHungError    its server hangs: nobody waits for it, and its role ends it
    ├── EngineVersionError     an engine does not serve the version it should
    ├── AlreadyCommittedError  another process was first; started again, this one goes on after it
    └── DeadlineExceededError  a bounded wait ran out

Every message says what was expected, what was found, and what to do next, on one line.
"""

from __future__ import annotations

from precision.text import MESSAGE_CHARACTERS, one_line

FATAL_EXIT_CODE = 64
"""Exit status of a process that met a FatalError: it must not be started again, the run has failed."""
SUPERSEDED_EXIT_CODE = 65
"""Exit status of a process that found a later start of its role: it must not be started again, the run goes on."""
STOPPED_EXIT_CODE = 143
"""Exit status of a role that was asked to end (SIGTERM) before the run was finished: started again, it goes on."""


class EvenKeelError(Exception):
    """Root of every error that this project raises on purpose. Whatever it quotes (a path, a value, a log), its text is
    one line that can be printed, of 2,000 characters at most."""

    def __str__(self) -> str:
        return one_line(super().__str__(), MESSAGE_CHARACTERS)


class FatalError(EvenKeelError):
    """Trying again with the same input cannot help."""


class RecipeError(FatalError):
    """The recipe is wrong; the message names the key, the value found and what is allowed."""


class ModelError(FatalError):
    """A model folder, its tokenizer or its shapes cannot be used."""


class MachineError(FatalError):
    """This machine lacks what the recipe asks for: a package, a GPU, a folder that can be written."""


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


class ContractMismatchError(StoreError):
    """The batch was sampled under a logprob contract that is not the learner's."""


class DiskFullError(FatalError):
    """A disk is full, or too full for what is to be written. What is committed stays."""


class PromptsExhaustedError(FatalError):
    """Every problem of the task is solved (prompts.solved_pass_rate): nothing is left to ask."""


class RewardError(FatalError):
    """The reward function fails on too many samples, or does not accept the answers of its own task."""


class ExpertReplayError(FatalError):
    """Routed experts of a batch do not fit the model, or a pass did not use each of them exactly once."""


class NonFiniteError(FatalError, FloatingPointError):
    """A NaN or infinity was about to reach the optimizer."""


class SupersededError(FatalError):
    """A later start of the same role has taken over; this process must write nothing more."""


class PortInUseError(FatalError):
    """A port that the recipe names is taken by another process."""


class EngineStartError(FatalError):
    """An engine did not come up before its deadline."""


class StoppedError(EvenKeelError):
    """The process was asked to end, and did so in order: what it had is saved. Nothing failed."""


class RetryableError(EvenKeelError):
    """The same call may succeed later."""


class EngineUnavailableError(RetryableError):
    """An engine refused, dropped or never answered a request."""


class BadAnswerError(EngineUnavailableError):
    """An engine answered something that cannot be: it is at fault, however well it seems."""


class RequestFailedError(EngineUnavailableError):
    """A server ended one request with an error of its own (5xx). It may be well: others may fare better."""


class EngineHungError(EngineUnavailableError):
    """The server of an engine hangs. It need not be told anything: it would not hear it."""


class EngineVersionError(RetryableError):
    """An engine does not serve the policy version that it should."""


class AlreadyCommittedError(RetryableError):
    """Another process committed this batch first; what it committed counts."""


class DeadlineExceededError(RetryableError):
    """A bounded wait ran out."""
