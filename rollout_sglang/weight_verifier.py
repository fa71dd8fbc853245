"""An engine that was fed only claims a version; here it proves that it holds it (see pipeline.ports.weight_check).

    weights   names the version ─▶ its checksums are the digests of the proof, where those are known
    answers   it prefills the probe ─▶ as the learner scored it, within the gap that its precision allows
    peers     where digests are not known: its checksums are those of the first engine that came this far

Digests are exact: one flipped bit is found. Where they are not known (engines on GPUs), one engine's fault shows beside
the others, but which is right nobody knows, and the probe stands alone against a fault that all of them share.

That an engine is proved is written where every process sees it and where a restart forgets it: in the engine, as the
name of its weights. Fed or just started it serves `unverified-12`, proved `12`, and after a failed proof `unverified`;
an answer with a token of unverified weights is refused by whoever asked for it (see protocol.policy_version).

    pause ─▶ feed `unverified-12` ─▶ weights ─▶ name `12` ─▶ resume ─▶ answers, peers ─▶ admit
                                     └── fails ─▶ `unverified`, requests aborted ◀───┘

Weights are compared while the engine is paused, so that no token comes from weights with a flipped bit. A paused engine
scores nothing: while it prefills the probe, requests that were under way go on, and those that end within that moment
are kept. They are of weights whose checksums were right, unless checksums are not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline.errors import EngineVersionError, RetryableError
from pipeline.ports.weight_check import WeightCheck
from pipeline.stopwatch import Stopwatch
from rollout_sglang.client import EngineClient

Held = Sequence[Mapping[str, str]]
"""For each tensor parallel rank, parameter → digest."""


@dataclass
class ReferenceChecksums:
    """What the first engine that proved a version held, where nobody knows what that should be: what the next ones
    must hold."""

    version: int | None = None
    proof: WeightCheck | None = None
    url: str = ""
    held: Held = field(default=())

    def agree(self, engine: EngineClient, version: int, proof: WeightCheck | None, held: Held) -> None:
        """An engine has passed everything else. Raises EngineVersionError when it holds something else than the first.

        A version may be published again, with other weights: then its proof differs too.
        """
        if (version, proof) == (self.version, self.proof):
            _compare(engine, version, held, self.held, f"{self.url} holds")
        else:
            self.version, self.proof, self.url, self.held = version, proof, engine.url, held


class WeightVerifier:
    """Has engines prove what they hold, and remembers the first of each version as the others' reference."""

    def __init__(self, deadline_s: float) -> None:
        """`deadline_s` bounds one engine's checksum of all of its weights."""
        self._reference = ReferenceChecksums()
        self._deadline_s = deadline_s

    async def verify(self, engine: EngineClient, version: int, proof: WeightCheck | None) -> dict[str, float]:
        """Have the engine, paused or not, prove `version`; then it is named so and not paused.

        Returns checksum_s and probe_s, their sum verify_s, engines_checked (1 if it could show checksums, else 0) and,
        with a probe, probe_gap_nats. An engine that fails is invalidated. Raises EngineVersionError with what is wrong,
        RetryableError when it does not answer.
        """
        watch = Stopwatch()
        held = await self._named(engine, version, proof)
        watch.lap("checksum_s")
        try:
            gap = await verify_probe(engine, proof)
            if held is not None and not (proof is not None and proof.digests):
                self._reference.agree(engine, version, proof, held)
        except RetryableError:
            await invalidate(engine)
            raise
        watch.lap("probe_s")
        measured = {} if gap is None else {"probe_gap_nats": gap}
        verify_s = sum(watch.seconds.values())
        return watch.seconds | {"verify_s": verify_s, "engines_checked": float(held is not None)} | measured

    async def _named(self, engine: EngineClient, version: int, proof: WeightCheck | None) -> Held | None:
        try:
            held = await verify_checksums(engine, version, proof, deadline_s=self._deadline_s)
            await engine.name(version)
        except RetryableError:
            await invalidate(engine)
            raise
        finally:
            await engine.resume()
        return held


async def invalidate(engine: EngineClient) -> None:
    """Take the version from an engine, abort its requests, let it go on: as far as it still answers.

    One that does not is unverified when it is started again.
    """
    with suppress(RetryableError):
        await engine.invalidate()
    with suppress(RetryableError):
        await engine.resume()


async def verify_checksums(
    engine: EngineClient, version: int, proof: WeightCheck | None, *, deadline_s: float
) -> Held | None:
    """What the engine, paused or not, holds, once it was compared with the proof's digests; None where the server
    cannot tell.

    Raises EngineVersionError naming the first parameter that differs, RetryableError when the engine does not answer.
    """
    await engine.verify(version)
    held = await engine.checksums(deadline_s=deadline_s)
    if held is not None and proof is not None and proof.digests:
        _compare(engine, version, held, proof.digests, "the learner sent")
    return held


async def verify_probe(engine: EngineClient, proof: WeightCheck | None) -> float | None:
    """Mean gap of the probe in nats; None without one. The engine must not be paused. Raises EngineVersionError."""
    if proof is None or proof.probe is None:
        return None
    probe = proof.probe
    gap = probe.mean_gap_nats(await engine.prompt_logprobs(probe.rows))
    if gap > probe.max_mean_gap_nats:
        raise EngineVersionError(
            f"engine {engine.index} at {engine.url} scores the probe of version {proof.version} {gap:.2g} nats from "
            f"the learner in the mean, allowed {probe.max_mean_gap_nats:.2g} (weights.probe_max_gap_nats): it holds "
            "other weights or scales, or computes otherwise; it gets no requests until it is fed again"
        )
    return gap


def _compare(engine: EngineClient, version: int, held: Held, expected: Held, whose: str) -> None:
    if len(held) != len(expected):
        raise EngineVersionError(
            f"engine {engine.index} at {engine.url} has {len(held)} tensor parallel ranks, the proof of version "
            f"{version} is for {len(expected)}; start it with rollout.tensor_parallel of the recipe"
        )
    for rank, (ours, theirs) in enumerate(zip(held, expected, strict=True)):
        wrong = [name for name, digest in theirs.items() if ours.get(name) != digest]
        if wrong:
            raise EngineVersionError(
                f"engine {engine.index} at {engine.url} holds {len(wrong)} of {len(theirs)} parameters of version "
                f"{version} with another digest, first {wrong[0]} of rank {rank}: {ours.get(wrong[0], 'missing')}, "
                f"{whose} {theirs[wrong[0]]}; it gets no requests until it is fed again"
            )
