"""Verify that an engine holds the version that it claims. pipeline.ports.weights defines the checks.

    weights   the engine names the version ─▶ its checksums are the check's digests, where those are known
    formats   it holds each module in the format of the check, where its server can tell; once for each admission
    answers   it prefills the probe ─▶ its log-probabilities are as close to the learner's as its precision allows, and
              to the learner's in emulated formats where those are known
    graphs    on GPUs: no weight lies elsewhere than when CUDA graphs were captured, and the tokens that it decodes
              on the probe's rows, by its graphs, have the log-probabilities that it prefills for them
    peers     where digests are not known: its checksums are those of the first engine that was verified

Digests are exact: they reveal one flipped bit. They are not known for engines on GPUs. There, comparing engines reveals
a fault of one of them, though not which engine is right, and only the probe reveals a fault that all share.

The engine holds the result, as the name of its weights, so that every process sees it and a restart loses it. An engine
serves `unverified-12` after it was started or given weights, `12` when it is verified, and `unverified` after its check
failed. Clients refuse tokens of unverified weights (see protocol.policy_version).

    pause ─▶ give weights `unverified-12` ─▶ weights ─▶ name `12` ─▶ resume ─▶ answers, peers ─▶ admit
                                             └─── fails ─▶ `unverified`, requests aborted ◀──┘

A CUDA graph reads weights by their addresses: if an update put them elsewhere, decoding would go on with the old ones
while prefill, checksums and all else show the new ones. The addresses tell that exactly. Decoding the rows costs a
request of DECODED tokens a row and a prefill of them; it finds graphs that compute otherwise for any other reason.

Checksums are compared while the engine is paused, so that no token comes from weights with a flipped bit. The probe
needs a running engine: requests under way go on meanwhile, and those that end are kept. Their weights had the right
checksums, where checksums are known. An engine computes its answers at once; the values to compare them with may come
later (pipeline.ports.weights).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from pipeline.data.batch import Sampling
from pipeline.errors import EngineUnavailableError, EngineVersionError, EvenKeelError
from pipeline.ports.weights import ComingCheck, WeightCheck, come, mean_gap_nats
from pipeline.spans import Stopwatch
from precision.formats.audit import audit
from rollout_sglang.client import EngineClient

INVALIDATE_DEADLINE_S = 5.0
"""Longest wait for an engine that failed: it gets no requests, whether it answers or not."""
NAMED_FINDINGS = 3
DECODED = 8
"""Tokens of each row of the probe in whose place an engine decodes others."""
Held = Sequence[Mapping[str, str]]
"""For each tensor parallel rank, parameter → digest."""


class WeightVerifier:
    """A verifier of engines; each version's first verified engine is the reference for the others."""

    def __init__(self, deadline_s: float) -> None:
        """`deadline_s` bounds the checksum of all weights of one engine."""
        self._reference: tuple[int, WeightCheck, str, Held] | None = None
        """Where digests are not known: version, check, URL and checksums of the first verified engine."""
        self._deadline_s = deadline_s

    async def verify(
        self, engine: EngineClient, version: int, check: ComingCheck, *, formats_are_known: bool = False
    ) -> dict[str, float]:
        """Verify that the engine, paused or not, holds `version`; then name it so and resume it. `formats_are_known`
        skips the comparison of formats.

        Returns checksum_s and probe_s, including waits for parts of the check, their sum verify_s, engines_checked (1
        if it could show checksums, else 0) and verify_probe's measurements. Raises EngineVersionError with the
        difference, and RetryableError when the engine does not answer; either way the engine is invalidated.
        """
        watch = Stopwatch(lane=f"engine {engine.index}/weights", version=version)
        try:
            held = await verify_checksums(
                engine, version, check, deadline_s=self._deadline_s, formats_are_known=formats_are_known
            )
            await engine.name(version)
        except EvenKeelError:
            await invalidate(engine)  # which resumes it, too
            raise
        await engine.resume()
        watch.lap("checksum_s")
        try:
            measured = await verify_probe(engine, check)
            if held is not None and not await come(check.digests):
                # A version may be published again with other weights: then the check and the first engine differ too.
                if self._reference is not None and self._reference[:2] == (version, check.whole()):
                    _, _, url, expected = self._reference
                    _compare(engine, version, held, expected, f"{url} holds")
                else:
                    self._reference = version, check.whole(), engine.url, held
        except EvenKeelError:
            await invalidate(engine)
            raise
        watch.lap("probe_s")
        verify_s = sum(watch.seconds.values())
        return watch.seconds | {"verify_s": verify_s, "engines_checked": float(held is not None)} | measured


async def invalidate(engine: EngineClient) -> None:
    """Take the version from an engine, abort its requests, and resume it. An engine that does not answer stays as it
    is: it is unverified when it is started again."""
    with suppress(EvenKeelError, TimeoutError):
        async with asyncio.timeout(INVALIDATE_DEADLINE_S):
            await engine.invalidate()
    with suppress(EvenKeelError, TimeoutError):
        async with asyncio.timeout(INVALIDATE_DEADLINE_S):
            await engine.resume()


async def verify_checksums(
    engine: EngineClient, version: int, check: ComingCheck, *, deadline_s: float, formats_are_known: bool = False
) -> Held | None:
    """Return the checksums of the engine, paused or not, after comparing them with the check's digests, if any; None
    where the server cannot tell. Raises EngineVersionError naming the first parameter that differs or the modules whose
    formats differ from the check's, RetryableError when the engine does not answer."""
    await engine.verify(version)
    # Formats are compared where the check names some and the server can tell: this package started it.
    if check.formats is not None and not formats_are_known:
        ranks = await engine.formats(deadline_s=deadline_s)
        if findings := [] if ranks is None else audit(ranks, check.formats):
            named = "; ".join(map(str, findings[:NAMED_FINDINGS]))
            raise EngineVersionError(
                f"engine {engine.index} at {engine.url} holds {len(findings)} modules of version {check.version} in "
                f"other formats than the quant map: {named}; it gets no requests until it is started with the policy's "
                "own config.json, and without arguments that name a quantization"
            )
    if (await engine.dialect()).graphs and (moved := await engine.moved_weights(deadline_s=deadline_s)):
        raise EngineVersionError(
            f"engine {engine.index} at {engine.url} decodes by CUDA graphs of older weights: {len(moved)} of version "
            f"{version} lie elsewhere than at the capture, first {moved[0]}; it gets no requests. Start it with "
            "--disable-decode-cuda-graph (rollout.extra_args), or use another weights.channel"
        )
    held = await engine.checksums(deadline_s=deadline_s)
    digests = await come(check.digests)
    if held is not None and digests:
        _compare(engine, version, held, digests, "the learner sent")
    return held


async def verify_probe(engine: EngineClient, check: ComingCheck) -> dict[str, float]:
    """Return probe_gap_nats and, where formats were emulated, probe_kernels_nats: mean gaps to the learner, and to the
    learner in the rollout's formats; on a GPU also probe_decode_nats (verify_decoding). Empty without a probe. The
    engine must run. Raises EngineVersionError."""
    scored = await engine.prompt_logprobs(check.rows) if check.rows else []
    probe = await come(check.probe)
    if probe is None:
        return {}
    gap = mean_gap_nats(probe.logprobs, scored)
    kernels = mean_gap_nats(probe.quantized, scored) if probe.quantized else None
    measured = {"probe_gap_nats": gap} | ({} if kernels is None else {"probe_kernels_nats": kernels})
    # The formats' cost is no fault of the engine, and may grow beyond any bound during training.
    checked, of_whom = (gap, "the learner") if kernels is None else (kernels, "the learner in the engine's formats")
    if checked > probe.max_mean_gap_nats:
        raise EngineVersionError(
            f"engine {engine.index} at {engine.url} scores the probe of version {check.version} {checked:.2g} nats "
            f"from {of_whom} in the mean, allowed {probe.max_mean_gap_nats:.2g} (weights.probe_max_gap_nats): it holds "
            "other weights or scales, or computes otherwise; it gets no requests until it is given weights again"
        )
    if (await engine.dialect()).graphs:
        measured["probe_decode_nats"] = await verify_decoding(engine, check.rows, probe.max_mean_gap_nats)
    return measured


async def verify_decoding(engine: EngineClient, rows: Sequence[Sequence[int]], max_mean_gap_nats: float) -> float:
    """Return the mean |decode − prefill| in nats of the tokens that a running engine samples in place of the last of
    each row: from the second one on they come from its graphs, if it has any. Raises EngineVersionError above
    `max_mean_gap_nats`."""
    starts, sampling = [row[: max(1, len(row) - DECODED)] for row in rows], Sampling(max_new_tokens=DECODED)
    answers = await asyncio.gather(*(engine.generate(start, 1, sampling) for start in starts))
    sampled = [(start, answer[0]) for start, answer in zip(starts, answers, strict=True) if len(answer[0].tokens)]
    if not sampled:
        raise EngineUnavailableError(f"engine {engine.index} at {engine.url} decoded nothing on the probe; ask again")
    scored = await asyncio.gather(*(engine.response_logprobs(row, [one.tokens.tolist()]) for row, one in sampled))
    gap = mean_gap_nats([one.logprobs.tolist() for _, one in sampled], [part for parts in scored for part in parts])
    if gap > max_mean_gap_nats:
        raise EngineVersionError(
            f"engine {engine.index} at {engine.url} decodes tokens {gap:.2g} nats in the mean from what it prefills "
            f"for them, allowed {max_mean_gap_nats:.2g} (weights.probe_max_gap_nats): its CUDA graphs compute with "
            "other weights or otherwise; it gets no requests until it is given weights again"
        )
    return gap


def _compare(engine: EngineClient, version: int, held: Held, expected: Held, whose: str) -> None:
    if len(held) != len(expected):
        raise EngineVersionError(
            f"engine {engine.index} at {engine.url} has {len(held)} tensor parallel ranks, the check of version "
            f"{version} is for {len(expected)}; start it with rollout.tensor_parallel of the recipe"
        )
    for rank, (ours, theirs) in enumerate(zip(held, expected, strict=True)):
        wrong = [name for name, digest in theirs.items() if ours.get(name) != digest]
        if wrong:
            raise EngineVersionError(
                f"engine {engine.index} at {engine.url} holds {len(wrong)} of {len(theirs)} parameters of version "
                f"{version} with another digest, first {wrong[0]} of rank {rank}: {ours.get(wrong[0], 'missing')}, "
                f"{whose} {theirs[wrong[0]]}; it gets no requests until it is given weights again"
            )
