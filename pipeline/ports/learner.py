"""The port of the learner loop to the trained policy: implemented by `megatron_bridge.learner`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batch import Batch, Share
from pipeline.data.checksums import Fingerprint
from pipeline.data.run_directory import unfenced
from precision.mismatch.statistics import Mismatch
from precision.torch_on_use import Tensor

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Update:
    """What an optimizer step measured, or all those of a batch; the same on every rank."""

    metrics: dict[str, float]
    """loss, grad_norm, lr, entropy, num_tokens, padding_share, the objective's sums as means, mismatch statistics."""
    histogram: list[float]
    """Tokens counted by log-ratio, in the bins of precision.ratios."""
    device_logprobs: Tensor = field(repr=False)
    """float32 [responses] the learner's log-probabilities at the weights before the step that trained on them, in the
    batch's order, on the learner's device; NaN where no step looked."""
    mismatch: Mismatch | None = field(default=None, repr=False)
    """Learner against engine, in all detail; None from a learner that does not measure it."""

    @cached_property
    def logprobs(self) -> NDArray[np.float32]:
        """[responses] `device_logprobs` on the host. To ask for them copies them, once: let rank 0 alone ask, which
        writes them."""
        found: NDArray[np.float32] = self.device_logprobs.cpu().numpy()
        return found


class SaveUnderWay(Protocol):
    """What a learner writes beside its training."""

    @property
    def hashed(self) -> Mapping[str, Fingerprint]:
        """Files of the folder by name, hashed and made durable by the ranks that wrote them; once all is written."""
        ...

    def advance(self, wait_s: float) -> bool:
        """Whether everything is written; each rank waits for its own share no longer than `wait_s`. Collective, and not
        to be called again once it was. Raises on every rank what stopped any."""
        ...


class Learner(Protocol):
    """The trained policy. Every method is collective: all ranks call it, in the same order."""

    @property
    def is_rank_zero(self) -> bool:
        """True on the one rank that writes metrics and events."""
        ...

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        ...

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        ...

    @property
    def num_data_ranks(self) -> int:
        """Over how many ranks the samples of a batch are divided."""
        ...

    def share(self, lengths: NDArray[np.int64], together: Sequence[NDArray[np.bool_]]) -> Share:
        """Divide samples of these `lengths` [samples], in tokens, over the ranks. Each set of them in `together`
        [samples] is dealt out evenly by itself, because a pass over it alone should take all ranks as long.

        A batch that is read so (Batch.share) may be scored and trained on, as a whole or in parts. Not collective:
        every rank finds the same.
        """
        ...

    def sum_of_shares(self, values: NDArray[Any]) -> NDArray[Any]:
        """Numbers of all samples, of 1 or 4 bytes, from ranks that have them of their own alone, and 0 in the place of
        others: what the one has that has them, bit for bit. `values` may be overwritten."""
        ...

    def score(self, batch: Batch) -> Tensor:
        """Score the batch at the present weights, without gradients.

        Returns float32 [responses] natural log-probabilities in the batch's order, on the learner's device, where
        `update` reads them; those of tokens that no engine sampled mean nothing.
        """
        ...

    def update(
        self,
        batch: Batch,
        advantages: NDArray[np.float32],
        scored: Tensor | NDArray[np.float32] | None,
        *,
        old_logprobs: Tensor | NDArray[np.float32] | None = None,
        trained: NDArray[np.bool_] | None = None,
        lr_factor: float = 1.0,
    ) -> Update:
        """One optimizer step; `advantages` is [samples] or [responses]. `lr_factor` is on the learning rate.

        `scored` is what `score(batch)` returned at the present weights. It is None for an objective that is not
        prepared from it, or that is prepared from `old_logprobs` alone. `old_logprobs` are the learner's
        log-probabilities [responses] before the first of several updates (pipeline.trainer.old_logprobs), by default
        those of `scored`. `trained` [samples] names the samples that are run through the model, by default all; the
        others still count in the denominators.

        Raises NonFiniteError, before anything is changed, when loss or gradient is not finite.
        """
        ...

    def begin_save(self, directory: Path) -> SaveUnderWay:
        """Copy model, optimizer and RNG state to host memory, and write the copy into an empty directory while training
        goes on (no commit marker: the caller's business). Only one such save may be under way."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what was saved, whatever layout saved it."""
        ...

    def export(self, directory: Path, fence: Callable[[], None] = unfenced) -> None:
        """Write the weights as a full-precision HF safetensors folder with config, tokenizer and manifest.json. `fence`
        is called before the folder gets its name; it raises where this process may write no more."""
        ...

    def tell(self, action: Callable[[], T]) -> T:
        """Run an action on rank 0 alone; every rank gets its result (a JSON value), or raises its error. What only the
        file system knows is decided so: ranks on different hosts may see different files for a while.

        The other ranks wait no longer than learner.step_deadline_s: an action that may take longer is asked again.
        """
        ...

    def everywhere(self, action: Callable[[], None]) -> None:
        """Run an action on every rank. When it fails on one, all raise that error, so that none waits for it."""
        ...

    def all_of(self, look: Callable[[], bool]) -> bool:
        """Whether all ranks say so. When one fails, all raise that error."""
        ...

    def barrier(self) -> None:
        """Wait for every rank."""
        ...


class QuantizationMeter(Protocol):
    """Measures on tokens of a batch, at the learner's present weights. Every method is collective and returns the same
    on all ranks."""

    def term(self, batch: Batch, promoted: Sequence[str]) -> float | None:
        """-ln of the token ESS of the learner against itself with the engines' formats emulated, where the groups
        `promoted` are not quantized. None where the learner cannot emulate."""
        ...

    def groups(self, batch: Batch, names: Sequence[str]) -> dict[str, float] | None:
        """The same for each of some groups as the only one that is quantized. None where the learner cannot emulate."""
        ...


def looked_at(batch: Batch, learner_logprobs: NDArray[np.float32]) -> NDArray[np.bool_]:
    """bool [responses]: the tokens that an engine sampled and the learner has a log-probability of, be it infinite.
    `learner_logprobs` is [responses], natural log."""
    return np.asarray(batch.loss_mask & ~np.isnan(learner_logprobs))
