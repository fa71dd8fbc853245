"""Is what a running engine holds what the quant map says, and what the learner published and emulates?

map            formats_of(quant map)
engine         asked over HTTP (rollout_sglang.server.format_report)
published      the policy folder that the engine serves: scales and values
emulated       the learner's weights under its emulation of the map: values
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_bridge.hf.tensor_folder import TensorFolder
from pipeline.errors import EngineVersionError
from precision.formats.audit import Finding, Held, audit, formats_of
from precision.formats.quant_map import QuantMap
from rollout_sglang.client import EngineClient


async def audit_engine(
    engine: EngineClient,
    quant_map: QuantMap | None,
    dtype: str,
    *,
    published: Path | None = None,
    emulated: dict[str, Held] | None = None,
    deadline_s: float = 600.0,
) -> list[Finding]:
    """What is wrong with an engine that should serve `quant_map` and compute in `dtype` ("bfloat16"); empty: nothing.

    `published`: the policy folder that it serves, read whole. `emulated`: what `weight_statistics.emulated_modules`
    makes of the learner's weights at that version. The engine's client must take part in a weight update
    (rollout_sglang.weights.update_lease): engines tell nobody else. Raises EngineVersionError when the engine cannot
    tell.
    """
    ranks = await engine.formats(deadline_s=deadline_s, statistics=True)
    if ranks is None:
        raise EngineVersionError(
            f"engine {engine.index} at {engine.url} cannot tell in which formats it holds its weights; start it by "
            "`evenkeel train` or `evenkeel role engine`, with SGLang 0.5.19 or newer"
        )
    formats = formats_of(quant_map, dtype)
    found = audit(ranks, formats, None if published is None or quant_map is None else expected(published, quant_map))
    if emulated is not None:
        found += [
            replace(one, message=f"by the learner's emulation, {one.message}")
            for one in audit(ranks, formats, emulated)
            if one.kind == "values"
        ]
    return found


def expected(published: Path, quant_map: QuantMap) -> dict[str, Held]:
    """What an engine should hold of a policy folder, by audited name (precision.formats.audit)."""
    from precision.formats.weight_statistics import published_modules

    return published_modules(TensorFolder(published).tensors(), quant_map)
