"""How weights get from the learner to the engines: what the learner loop calls, and what the engines offer to a sender.

learner loop ── WeightChannel ──▶ megatron_bridge.weight_sync.disk, .delta (through Fleet.load)
                                  megatron_bridge.weight_sync.streaming (through FleetUpdateSession, over a transport)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.data.checksums import read_sealed_json, verify_folder, write_sealed_json
from pipeline.data.membership import Member
from pipeline.errors import EngineVersionError, StoreError


class WeightChannel(Protocol):
    """Moves the learner's weights to every engine. Collective, but for `is_over`, which rank 0 is asked.

    The learner goes on after `begin`, and calls `finish` before it begins the next version, or waits for a folder. One
    that is asked to end may leave without: the next start publishes again.
    """

    def begin(self, version: int, *, learner_waits: bool = False) -> None:
        """Take the weights as they are now; they go to the engines while the caller changes its own. With
        `learner_waits` it waits instead, and engines may be paused at once."""
        ...

    def is_over(self, wait_s: float) -> bool:
        """Whether `finish` would return or raise at once; waits no longer than `wait_s` for that."""
        ...

    def finish(self) -> dict[str, float]:
        """Wait until the engines serve what was begun; raises on every rank what failed.

        Rank 0 gets measurements by name, the other ranks nothing. A name in `_s` is the seconds of a phase (publish_s:
        of all phases), a name in `_bytes` is a number of bytes. {} when nothing was begun."""
        ...

    def wait_for_folder(self) -> None:
        """Returns once the policy folder of the last published version is complete.

        A checkpoint of a later step waits for this: a learner that goes on from that checkpoint has later weights, and
        could not write the folder again.
        """
        ...

    def close(self) -> None:
        """Release connections and shared memory; the engines go on. Not collective."""
        ...


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor in a file or on its way to an engine: HF name, torch's name of the dtype (`bfloat16`), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ProcessGroupSpec:
    """A process group that a sender (rank 0) opens for one engine, whose ranks join it as 1, 2, …"""

    group: str
    address: str
    port: int
    backend: Literal["gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class WeightUpdateReport:
    """Which engines have failed in an update so far, and what was measured."""

    failures: Mapping[int, str]
    """Engine → why."""
    measured: Mapping[str, float]
    """Named as WeightChannel.publish names them."""
    number: int = 0
    """Of the update: every sender gives it with each call, and an engine refuses what was overtaken."""
    engines: Sequence[Member] = ()
    """Those that the update is for, as they were when it began."""
    staging: Sequence[int] = ()
    """Those of them that serve on, and take the weights when the update ends."""


T = TypeVar("T")
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


@dataclass(frozen=True, kw_only=True)
class WeightCheck:
    """What an engine must hold to be verified as one version. It gets requests only afterwards.

    An engine that names a version only claims it. Loading can go wrong without an error: scales of the former weights
    stay, an update is partial, other weights come under the right name. So the engine's formats, the checksums of its
    parameters and its log-probabilities of a few tokens are compared with these. The check lies in the policy folder:
    an engine that was restarted is verified by the same file as one that was given weights. Version 0 is made without a
    learner: it has no probe, only digests.
    """

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
            if probe is not None:
                logprobs, quantized = (
                    tuple(tuple(float(value) for value in row) for row in probe[name])
                    for name in ("logprobs", "quantized")
                )
                rows = tuple(tuple(int(token) for token in row) for row in probe["rows"])
                allowed = float(probe["max_mean_gap_nats"])
                probe = Probe(rows=rows, logprobs=logprobs, quantized=quantized, max_mean_gap_nats=allowed)
            check = WeightCheck(
                version=int(data["version"]),
                probe=probe,
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


def mean_gap_nats(learner: Sequence[Sequence[float]], engine: Sequence[NDArray[np.float32]]) -> float:
    """Return mean |log π_learner − log π_engine|; infinite when one of the engine's log-probabilities is not finite.

    Both hold [n - 1] log-probabilities for each row of a probe. From Probe.quantized it is what the engine computes
    otherwise, its formats apart. Raises ValueError for other shapes.
    """
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


Digests = tuple[Mapping[str, str], ...]


class ComingCheck:
    """A WeightCheck that the learner is still working out, while engines already work out their side.

        engine    has every tensor ─▶ hashes them ──┬▶ compared, named, continues ─▶ scores the probe ─┬▶ admitted
        learner   hashes what it sent ─▶ `digests` ─┘      scores the probe ─▶ `probe` ────────────────┘

    The rows of the probe and the formats are known from the beginning; what the answers are compared with comes later.
    Nothing is compared less, and nothing later than an engine needs it. Whoever makes one completes it, or calls
    `fail`: engines wait for it.
    """

    def __init__(self, version: int, rows: tuple[tuple[int, ...], ...], formats: Mapping[str, str] | None) -> None:
        self.version = version
        self.rows = rows
        """Of the probe; none without a probe."""
        self.formats = formats
        """As WeightCheck.formats."""
        self.digests: Future[Digests] = Future()
        """As WeightCheck.digests."""
        self.probe: Future[Probe | None] = Future()
        """As WeightCheck.probe."""

    @staticmethod
    def known(version: int, check: WeightCheck | None) -> ComingCheck:
        """All of a check that is there, or of none."""
        check = check or WeightCheck(version=version)
        rows = () if check.probe is None else check.probe.rows
        complete = ComingCheck(check.version, rows, check.formats)
        complete.digests.set_result(check.digests)
        complete.probe.set_result(check.probe)
        return complete

    def fail(self, why: str) -> None:
        """What has not come will not: engines that wait for it fail their check, with an EngineVersionError."""
        for part in (self.digests, self.probe):
            if not part.done():
                error = f"version {self.version} cannot be verified, for the learner failed meanwhile: {why}"
                part.set_exception(EngineVersionError(error))

    def whole(self) -> WeightCheck:
        """The check, once all of it came. Raises TimeoutError before, and what `fail` says."""
        digests, probe = self.digests.result(timeout=0), self.probe.result(timeout=0)
        return WeightCheck(version=self.version, probe=probe, digests=digests, formats=self.formats)


async def come(part: Future[T]) -> T:
    """A part of a check, once it is there. Whoever stops waiting takes it from nobody else."""
    return await asyncio.shield(asyncio.wrap_future(part))
