"""How weights get from the learner to the engines, as a recipe says it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from pipeline.config.section import Section


class WeightsSection(Section):
    channel: Literal["disk", "delta", "broadcast", "ipc"] = Field(
        "disk",
        description="disk: engines load a folder. delta: what changed since the last version is written, and "
        "overwritten in a folder on each engine's own host while the engine serves, which then loads that. broadcast: "
        "learner ranks send to the engines through process groups (gloo on a CPU, NCCL on GPUs). ipc: engines open the "
        "learner's memory; learner and engines run on one machine and see the same GPUs. With the last two the folder "
        "is written behind the engines' back, for those that restart.",
    )
    kv_cache: Literal["recompute", "keep"] = Field(
        "recompute",
        description="What becomes of answers under way when their engine takes new weights, as it does in async. "
        "recompute: all their tokens are read again, so that the next one is the new policy's. keep: they go on over "
        "the keys and values of the old weights, as in PipelineRL and ScaleRL: no token is read twice, the next ones "
        "are no policy's, and their ratios say by how much.",
    )
    bucket_mib: PositiveInt = Field(
        256, le=2**16, description="broadcast, ipc: tensors sent together, at most; a rank needs twice as much memory."
    )
    whole_every: PositiveInt = Field(
        16, description="delta: each so many versions one is written whole, too: engines that start begin with it."
    )
    keep: PositiveInt = Field(2, description="Published policies kept on disk, beside the one that is served.")
    publish_deadline_s: PositiveFloat = Field(600.0, description="Longest wait for one engine to serve new weights.")
    probe_max_gap_nats: PositiveFloat | None = Field(
        None,
        description="An engine whose prefill log-probabilities of the probe differ from the learner's by more than "
        "this, in the mean, gets no requests; from those with its formats emulated, where the learner can. Default: by "
        "rollout.precision.",
    )
