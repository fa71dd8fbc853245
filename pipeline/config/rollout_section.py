"""The recipe's `rollout`: engines, and how they sample. What is done with `rollout.interruption` is in
pipeline.rollout.group_sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from pipeline.config.section import Processes, Samples, Section, ServerUrls, Temperature
from precision.formats.quant_map_file import QuantMapFile
from precision.formats.rollout_format import RolloutFormat

HIGHEST_PORT = 65_535
RolloutPrecision = Literal[
    "fp32", "bf16", "fp8_tensor", "fp8_block", "emulated_fp6", "emulated_fp4", "emulated_nvfp4", "emulated_mxfp4"
]
MOST_KEPT = 3072
"""Largest top_k with kept sets. SGLang names at most 4096 tokens and ends a request that keeps more; tokens exactly as
likely as the last one are kept too, however many they are."""


class InterruptionSection(Section):
    """ScaleRL: a response that is still going on at a random length is cut and told to give its answer."""

    from_tokens: PositiveInt = Field(description="Fewest tokens after which a response is cut; the number is random.")
    to_tokens: PositiveInt = Field(description="Most tokens after which a response is cut.")
    phrase: str = Field(
        "Okay, time is up. Let me stop thinking and formulate an answer now. </think>",
        min_length=1,
        description="Text that is appended to a response that was cut. Its tokens are not trained on.",
    )
    answer_tokens: PositiveInt = Field(description="Most tokens of the answer that follows the phrase.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.from_tokens > self.to_tokens:
            raise ValueError(f"from_tokens {self.from_tokens} is above to_tokens {self.to_tokens}; lower it")
        return self


class RolloutSection(Section):
    engines: Processes = Field(1, description="SGLang servers; more than one get SGLang's router in front.")
    tensor_parallel: Processes = Field(1, description="GPUs of one engine.")
    precision: RolloutPrecision = Field(
        "bf16",
        description="fp32 is for a CPU and for exact comparisons. fp8_block: e4m3 weights with a scale for each "
        "128×128 block, made by the learner; activations in 1×128 groups. fp8_tensor: SGLang quantizes the weights, "
        "one scale a matrix; on CPUs only, for on a GPU it cannot load the next version over them. emulated_fp6 "
        "(e3m2), emulated_fp4 (e2m1), emulated_nvfp4 and emulated_mxfp4 put learning under stress: engines on CPUs "
        "emulate them, engines on GPUs refuse them.",
    )
    quant_map: QuantMapFile | None = Field(
        None,
        description="Which layers are held in which format; a YAML file, which becomes a part of the recipe (`evenkeel "
        "recipe` shows it). Default: every linear layer of the decoder in `precision`.",
    )
    prompts_per_batch: PositiveInt = Field(
        32,
        le=2**20,
        description="Prompts of a batch, each sampled group_size times. More: less noise a step, and longer steps.",
    )
    group_size: Samples = Field(8, description="Samples of a prompt.")
    max_new_tokens: PositiveInt = Field(
        2048, description="Tokens of the longest response; one that is longer is cut. A batch waits for its longest."
    )
    temperature: Temperature = Field(1.0, description="Of sampling, softmax(logits / temperature); see evaluation's.")
    top_p: float = Field(
        1.0, gt=0.0, le=1.0, description="Sample among the likeliest tokens that hold this probability; 1: among all."
    )
    top_k: int = Field(-1, description="Sample among so many of the likeliest tokens; -1: among all.")
    kept_set: bool = Field(
        True,
        description="Where top_p or top_k cut: engines (SGLang 0.5.23) say which tokens they left, and both sides' "
        f"probabilities are renormalized over these (top_k -1 is {MOST_KEPT} then). False: over the whole vocabulary.",
    )
    replay_experts: bool = Field(
        False,
        description="Mixtures of experts only: engines (SGLang 0.5.23) say which experts each token went to, and the "
        "learner sends it to the same ones. Where they cannot know any more, the learner's own routers choose.",
    )
    context_tokens: PositiveInt = Field(4096, description="Longest prompt + response that an engine accepts.")
    concurrent_prompts: PositiveInt = Field(64, description="Prompts under way at once over all engines.")
    urls: ServerUrls = Field(
        (), description="Engines that exist already, by whomever they were started: http://HOST:PORT of each."
    )
    port: int | None = Field(
        None, ge=1, le=HIGHEST_PORT, description="First engine's port; the next ones follow. Default: any free."
    )
    request_deadline_s: PositiveFloat = Field(
        1800.0, description="Seconds that an engine has for a request: the longest answer, with room for a publish."
    )
    start_deadline_s: PositiveFloat = Field(
        600.0,
        description="An engine that is not up by then is stopped and started again. It is also the longest wait for "
        "version 0, and of the hosts of one role for each other.",
    )
    interruption: InterruptionSection | None = Field(
        None, description="ScaleRL: long responses are told to give their answer; default: none are."
    )
    extra_args: tuple[str, ...] = Field((), description="Passed to SGLang as they are; none that another key says.")

    @property
    def started_engines(self) -> int:
        """Engines that are started with a run: none where `urls` names those that exist."""
        return 0 if self.urls else self.engines

    @property
    def starts_router(self) -> bool:
        """Whether a router is started with them."""
        return self.started_engines > 1

    @property
    def quantized_format(self) -> RolloutFormat | None:
        """The format of what engines quantize; None for fp32 and bf16."""
        return None if self.precision in ("fp32", "bf16") else RolloutFormat(self.precision)

    @property
    def asks_for_kept_sets(self) -> bool:
        """Whether there is a cut, and engines are to say what it left."""
        return self.kept_set and (self.top_p < 1.0 or self.top_k != -1)

    @field_validator("quant_map", mode="before")
    @classmethod
    def _read(cls, named: object) -> object:
        """A run must not need a file outside its directory."""
        return QuantMapFile.read(Path(named)) if isinstance(named, str | Path) else named

    @model_validator(mode="after")
    def _one_quantized_format(self) -> Self:
        if self.quant_map is not None:
            mine = set() if self.quantized_format is None else {self.quantized_format}
            if (named := self.quant_map.rollout_formats()) != mine:
                raise ValueError(
                    f"quant_map names {', '.join(sorted(named)) or 'no quantized format'}, but precision is "
                    f"{self.precision}; an engine serves one quantized format: set rollout.precision to the map's"
                )
        return self

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k is {self.top_k}; use -1 (whole vocabulary) or a positive number")
        if self.asks_for_kept_sets and self.top_k > MOST_KEPT:
            raise ValueError(
                f"top_k is {self.top_k}, but engines name at most {MOST_KEPT} tokens that a cut leaves; lower "
                "rollout.top_k, or set rollout.kept_set=false"
            )
        if self.urls and self.engines != len(self.urls):
            raise ValueError(
                f"engines is {self.engines}, but urls names {len(self.urls)} engines; set rollout.engines to that"
            )
        if self.port is not None and self.port + self.engines > HIGHEST_PORT:
            raise ValueError(
                f"port {self.port} leaves no port up to {HIGHEST_PORT} for each of {self.engines} engines and the "
                "router; lower rollout.port"
            )
        if self.max_new_tokens >= self.context_tokens:
            raise ValueError(
                f"max_new_tokens {self.max_new_tokens} leaves no room for a prompt in context_tokens "
                f"{self.context_tokens}; raise rollout.context_tokens"
            )
        return self
