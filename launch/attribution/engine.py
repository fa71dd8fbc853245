"""Run the engine's part of an attribution: sample, score the samples, and audit the loaded weights."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launch.attribution.rows import SampledRows
from launch.build.components import build_prompts, build_quant_map, build_sampling, build_tokenizer
from launch.build.engines import engine_dtype
from launch.run.one_engine import OneEngine
from megatron_bridge.hf.model_config import read_hf_config
from megatron_bridge.hf.tensor_files import TensorFolder
from pipeline.analysis.mismatch import EngineCheck
from pipeline.data.batch import Completion, KeptSets, Prompt
from pipeline.data.routed_experts import RoutedExperts
from pipeline.errors import EngineVersionError
from pipeline.ports.weights import WeightCheck
from precision.formats.audit import Held, Misheld, audit, formats_of
from precision.formats.quant_map import QuantMap
from rollout_sglang.client import EngineClient
from rollout_sglang.weights.update_lease import fresh_number

LARGEST_TEMPERED_VOCABULARY = 4096
"""Largest vocabulary scored with kept sets or a temperature, for which SGLang returns whole distributions."""
ROWS_AT_ONCE = 64


class MeasuredEngine(OneEngine):
    """An engine that compares its weights with the published ones, and goes on whatever the result."""

    audit = EngineCheck(compared=0, differing=(), misheld=())
    """The number of compared parameters (0 if unknown), those that differ from the published ones, and modules whose
    format, scales or values differ from the quant map and the published folder (precision.formats.audit)."""

    async def verify(self) -> None:
        """Compare the weights and record the findings. The engine counts as verified anyway, to be measured."""
        version = self.run.newest_policy(self.run.published_version())
        client = self.client()
        client.take_part(fresh_number())
        try:
            await self._compare(client, version)
        finally:
            await client.close()

    def serve(self, version: int) -> None:
        """Load another version of the run's weights."""

        async def load() -> None:
            client = self.client()
            client.take_part(fresh_number())
            try:
                await client.pause()
                try:
                    await client.update_from_disk(
                        version, self.run.policy_directory(version), deadline_s=self.recipe.weights.publish_deadline_s
                    )
                finally:
                    await client.resume()
                await self._compare(client, version)
            finally:
                await client.close()

        asyncio.run(load())

    def sample_task(self, num_prompts: int) -> SampledRows:
        """Sample the task's first prompts by the recipe, all at once."""
        prompts = build_prompts(self.recipe, build_tokenizer(self.recipe))
        asked, sampling = [prompts.prompt(group) for group in range(num_prompts)], build_sampling(self.recipe)

        async def ask() -> list[list[Completion]]:
            client = self.client()
            slots = asyncio.Semaphore(self.recipe.rollout.concurrent_prompts)

            async def one(prompt: Prompt) -> list[Completion]:
                async with slots:
                    return await client.generate(prompt.tokens, self.recipe.rollout.group_size, sampling)

            try:
                return await asyncio.gather(*(one(prompt) for prompt in asked))
            finally:
                await client.close()

        groups = asyncio.run(ask())
        pairs = [(p.tokens, c) for p, group in zip(asked, groups, strict=True) for c in group if len(c.tokens)]
        return SampledRows(
            tokens=[[*prompt, *completion.tokens.tolist()] for prompt, completion in pairs],
            prompt_lengths=[len(prompt) for prompt, _ in pairs],
            decode=np.concatenate([completion.logprobs.astype(np.float64) for _, completion in pairs]),
            kept=KeptSets.joined([c.kept for _, c in pairs if c.kept]) if sampling.kept_set else None,
            experts=RoutedExperts.joined([c.experts for _, c in pairs if c.experts]) if sampling.experts else None,
        )

    def score(self, rows: SampledRows, temperature: float) -> NDArray[np.float64] | None:
        """Return [responses] prefill log-probabilities, over kept sets where there are any. None: the vocabulary is too
        large for kept sets or for another temperature than 1, or the model is a mixture, whose prefill routes tokens
        anew: other experts would look like a fault of decoding."""
        if rows.experts is not None:
            return None
        # From the model: it may have more rows than the tokenizer has tokens, and give them some probability.
        vocab_size, kept = int(read_hf_config(self.recipe.model.path)["vocab_size"]), rows.kept_by_row()
        plain = temperature == 1.0 and kept is None
        if not plain and vocab_size > LARGEST_TEMPERED_VOCABULARY:
            return None

        async def ask() -> list[NDArray[np.float32]]:
            client, found = self.client(), []
            try:
                for first in range(0, len(rows.tokens), ROWS_AT_ONCE):
                    here = slice(first, first + ROWS_AT_ONCE)
                    sets = None if kept is None else kept[here]
                    found += (
                        await client.prompt_logprobs(rows.tokens[here])
                        if plain
                        else await client.tempered_prompt_logprobs(rows.tokens[here], temperature, vocab_size, sets)
                    )
            finally:
                await client.close()
            return found

        scored = zip(asyncio.run(ask()), rows.prompt_lengths, strict=True)
        return np.concatenate([row[prompt - 1 :] for row, prompt in scored]).astype(np.float64)

    async def _compare(self, client: EngineClient, version: int) -> None:
        deadline_s = self.recipe.weights.publish_deadline_s
        held = await client.checksums(deadline_s=deadline_s)
        check = WeightCheck.load(self.run.policy_directory(version), version)
        await client.name(version)
        with suppress(EngineVersionError):  # an engine that cannot report its formats
            misheld = await audit_engine(
                client,
                build_quant_map(self.recipe),
                engine_dtype(self.recipe),
                published=self.run.policy_directory(version),
                deadline_s=deadline_s,
            )
            self.audit = replace(self.audit, misheld=(*self.audit.misheld, *misheld))
        if held is None or check is None or not check.digests:
            return
        pairs = zip(held, check.digests, strict=True)
        wrong = {name for ours, theirs in pairs for name, digest in theirs.items() if ours.get(name) != digest}
        differing = tuple(sorted({*self.audit.differing, *wrong}))
        self.audit = replace(self.audit, compared=sum(map(len, check.digests)), differing=differing)


async def audit_engine(
    engine: EngineClient,
    quant_map: QuantMap | None,
    dtype: str,
    *,
    published: Path | None = None,
    emulated: dict[str, Held] | None = None,
    deadline_s: float = 600.0,
) -> list[Misheld]:
    """Return the faults of an engine that should serve `quant_map` and compute in `dtype` ("bfloat16").

    `published` is the served policy folder, read whole. `emulated` holds `weight_statistics.emulated_modules` of the
    learner's weights at that version. The client must take part in a weight update (weights.update_lease), else engines
    refuse to answer. Raises EngineVersionError when the engine cannot report its formats.
    """
    ranks = await engine.formats(deadline_s=deadline_s, statistics=True)
    if ranks is None:
        raise EngineVersionError(
            f"engine {engine.index} at {engine.url} cannot tell in which formats it holds its weights; start it by "
            "`evenkeel train` or `evenkeel role engine`, with SGLang 0.5.19 or newer"
        )
    formats = formats_of(quant_map, dtype)
    expected = None
    if published is not None and quant_map is not None:
        from precision.formats.weight_statistics import published_modules

        expected = published_modules(TensorFolder(published).tensors(), quant_map)
    found = audit(ranks, formats, expected)
    if emulated is not None:
        found += [
            replace(one, message=f"by the learner's emulation, {one.message}")
            for one in audit(ranks, formats, emulated)
            if one.kind == "values"
        ]
    return found
