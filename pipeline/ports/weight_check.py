"""How it is verified that an engine holds the weights of a policy version. An engine gets requests only afterwards.

An engine that names a version only claims it. Loading can go wrong without an error: scales of the former weights stay,
an update is partial, other weights come under the right name. So each published version comes with three things to
compare:

    formats  in which format the engine should hold each module, by the quant map.
    digests  what the engine's checksum of each of its parameters should be. Where they are known, every bit is checked.
    probe    the learner's log-probabilities of a few fixed tokens. The engine's own must be as close as its precision
             allows, whatever kernels it runs.

All lie in the policy folder: an engine that was restarted is verified by the same file as one that was given weights.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.data.checksums import read_sealed_json, verify_folder, write_sealed_json
from pipeline.errors import StoreError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHT_CHECK_FILE = "weight_check.json"
NUM_ROWS, ROW_TOKENS = 4, 32
"""Of a probe; more rows where there are more data parallel ranks."""
NUM_ROWS_ON_CPU = 2
"""Both sides score the probe at every publish, which takes a CPU longer than sending the weights; digests, which are
known there, find what a mean over so few tokens does not."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Fixed rows of tokens and what the learner says about them at the published weights."""

    rows: tuple[tuple[int, ...], ...]
    """Token ids."""
    logprobs: tuple[tuple[float, ...], ...]
    """For each row, the learner's natural log-probabilities of tokens 1 … n-1 at temperature 1, as engines prefill."""
    quantized: tuple[tuple[float, ...], ...] = ()
    """The same with the rollout's formats emulated; () where that is not possible."""
    max_mean_gap_nats: float
    """Largest mean |log π_learner − log π_engine| over all tokens at which the engine passes; the learner with the
    formats emulated, where `quantized` is known."""

    def mean_gap_nats(self, engine: Sequence[NDArray[np.float32]]) -> float:
        """Mean |log π_learner − log π_engine|; infinite when one of the engine's log-probabilities is not finite.

        `engine` holds [n - 1] log-probabilities for each row. Raises ValueError for other shapes.
        """
        return _mean_gap(self.logprobs, engine)

    def kernels_nats(self, engine: Sequence[NDArray[np.float32]]) -> float | None:
        """As `mean_gap_nats`, from the learner with the formats emulated: what the engine computes otherwise, its
        formats apart. None where they could not be emulated."""
        return _mean_gap(self.quantized, engine) if self.quantized else None


@dataclass(frozen=True, kw_only=True)
class WeightCheck:
    """What one version is verified by. Version 0 is made without a learner: it has no probe, only digests."""

    version: int
    probe: Probe | None = None
    digests: tuple[Mapping[str, str], ...] = ()
    """For each tensor parallel rank of an engine: name of the engine's parameter → 16 hexadecimal digits, as SGLang's
    `/weights_checker` answers them. Empty where they cannot be known."""
    formats: Mapping[str, str] | None = None
    """Module → the format in which an engine should hold it (precision.formats.audit.formats_of); others must not be
    quantized. None: the engine is not asked."""

    def save(self, folder: Path) -> None:
        """Write `weight_check.json` into the policy folder, atomically."""
        write_sealed_json(folder / WEIGHT_CHECK_FILE, asdict(self))

    @staticmethod
    def load(folder: Path, version: int) -> WeightCheck | None:
        """The check of the policy folder of a version, None where the folder is not there (yet). Raises StoreError when
        the check is damaged, missing, or that of another version: whoever loads the folder would name it wrongly."""
        path = folder / WEIGHT_CHECK_FILE
        remedy = "stop the run and repair it: `evenkeel repair`"
        try:
            data = read_sealed_json(path, remedy)
            probe = data["probe"]
            check = WeightCheck(
                version=int(data["version"]),
                probe=None if probe is None else _probe_from(probe),
                digests=tuple(dict(rank) for rank in data["digests"]),
                formats=data["formats"],
            )
        except FileNotFoundError:
            if not folder.is_dir():
                return None
            raise StoreError(f"{path} is missing: nothing says of which version the weights are; {remedy}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} is damaged ({error}); {remedy}") from error
        if check.version != version:
            raise StoreError(f"{folder} holds version {check.version}, expected {version}; {remedy}")
        return check


def verify_policy(folder: Path, version: int, remedy: str) -> None:
    """Compare every file of a policy folder with its checksum, and the folder with the version that it is named by. The
    check is one of the listed files, so that one of another version is found beside right weights, too. Raises
    StoreError."""
    WeightCheck.load(folder, version)  # first: of what lies in its place it reads little
    verify_folder(folder, remedy)


class ChecksumRecorder(Protocol):
    """Works out, from the tensors that a publish sends, the checksums that an engine will report for them."""

    def watch(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same stream of (HF name, tensor), observed as it passes."""
        ...

    def observe(self, name: str, tensor: Tensor) -> None:
        """Take one tensor, in the format in which the engine gets it."""
        ...

    def digests(self) -> tuple[dict[str, str], ...]:
        """For each rank of an engine: parameter → checksum. Raises ValueError when a part of one never came."""
        ...


def _probe_from(data: Mapping[str, object]) -> Probe:
    rows, logprobs, quantized, allowed = (data[key] for key in ("rows", "logprobs", "quantized", "max_mean_gap_nats"))
    if not (
        isinstance(rows, list)
        and isinstance(logprobs, list)
        and isinstance(quantized, list)
        and isinstance(allowed, float | int)
    ):
        raise ValueError("its probe has fields of other kinds")
    return Probe(
        rows=tuple(tuple(int(token) for token in row) for row in rows),
        logprobs=_floats(logprobs),
        quantized=_floats(quantized),
        max_mean_gap_nats=float(allowed),
    )


def _floats(rows: list[Any]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(value) for value in row) for row in rows)


def _mean_gap(learner: Sequence[Sequence[float]], engine: Sequence[NDArray[np.float32]]) -> float:
    pairs = zip(learner, engine, strict=True)
    gaps = [np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)) for ours, theirs in pairs]
    mean = float(np.concatenate(gaps).mean())
    return mean if np.isfinite(mean) else float("inf")


def probe_rows(
    vocab_size: int, special: Collection[int], seed: int, *, num_rows: int = NUM_ROWS, row_tokens: int = ROW_TOKENS
) -> tuple[tuple[int, ...], ...]:
    """Rows of random token ids, none of them special; the same for the same arguments.

    Random ids use all of the embedding, and differences in the weights show in them as well as in text.
    """
    draw = random.Random(seed)
    plain = sorted(set(range(vocab_size)) - set(special)) or range(vocab_size)
    return tuple(tuple(draw.choice(plain) for _ in range(row_tokens)) for _ in range(num_rows))
