"""Define the recipe's sections for run, model, optimizer, engines, weights and schedule, and the class of all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from precision.formats.quant_map import QuantMapFile
from precision.formats.rollout_format import RolloutFormat
from precision.ratios import LrByLag
from precision.settings import Settings

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Temperature = Annotated[float, Field(ge=1e-3, le=1e3)]
"""A sampling temperature; SGLang takes less than 1e-6 for greedy sampling."""
MOST_PROCESSES = 2**16
Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
Samples = Annotated[int, Field(ge=1, le=2**16)]


Change = Literal["free", "fork", "never"]
"""When a key may change once a run has a batch. free: at any start, since it decides what a run costs, how long it
waits, where it ends or how it is measured. fork: in a fork alone (`evenkeel fork`), since samples and updates so far
used the old value. never: a checkpoint holds the old form."""
Changes = Mapping[str, Change]


class Section(Settings):
    """A recipe section: frozen, without unknown keys and NaN."""

    on_resume: ClassVar[Changes] = {}
    """Key → when it may change; `*` is all other keys. A key without an entry is `fork`."""


def _different_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    foreign = [url for url in urls if not re.fullmatch(r"https?://[^\s/@?#]+", url)]
    if foreign or len(set(urls)) < len(urls):
        raise ValueError(
            f"names {', '.join(foreign) or 'a server twice'}; expected a different http://HOST:PORT for each server"
        )
    return urls


ServerUrls = Annotated[tuple[str, ...], AfterValidator(_different_urls)]
"""`http://HOST:PORT` of different servers, without a password or a path."""


class RunSection(Section):
    on_resume: ClassVar[Changes] = {"*": "free", "name": "fork", "seed": "fork"}

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Folder below `root`.")
    root: Path = Field(Path("runs"), description="Where run directories live.")
    seed: NonNegativeInt = Field(0, description="Seeds prompt order, model-parallel RNG and evaluation prompts.")
    steps: PositiveInt = Field(description="Batches to train on, each in learner.updates_per_batch optimizer steps.")
    wait_deadline_s: PositiveFloat = Field(
        3600.0, description="Longest wait of learner or collector for the other; an evaluation must fit in."
    )
    max_restarts: NonNegativeInt = Field(5, description="Restarts of a process without progress before the run ends.")
    keep_batches: PositiveInt | None = Field(
        None,
        description="Remove older batches than the newest N that a checkpoint has learned from, and the learner's "
        "log-probabilities of them, but none that a checkpoint may train again. Default: keep all, which "
        "`evenkeel train --replay` needs.",
    )
    keep_logprobs: PositiveInt | None = Field(
        None, description="As keep_batches, but the learner's log-probabilities alone: they only explain a run."
    )


class ModelSection(Section):
    on_resume: ClassVar[Changes] = {"path": "never", "check_tokenizer": "free"}

    path: Path = Field(description="HF folder: config.json, safetensors, tokenizer. Qwen3, Qwen3-MoE, Qwen2 or Llama.")
    fp32_lm_head: bool = Field(
        False, description="Learner and engines multiply by the LM head in float32 (ScaleRL), whatever their precision."
    )
    check_tokenizer: bool = Field(
        True,
        description="Refuse a tokenizer with far fewer tokens than the model has rows, or with another end token than "
        "its config.json and generation_config.json name. False: both are meant.",
    )


Momentum = Annotated[float, Field(ge=0.0, lt=1.0)]
"""Share of a moment that stays in each step."""


class OptimizerSection(Section):
    on_resume: ClassVar[Changes] = {
        "lr_by_lag": "fork",
        "betas": "fork",
        "eps": "fork",
    }

    lr: PositiveFloat = Field(
        1e-6,
        le=100.0,
        description="Highest learning rate of AdamW. The default is for real models; tiny models take 1e-4 to 1e-3.",
    )
    min_lr: float = Field(0.0, ge=0.0, description="Learning rate at the end of the decay.")
    decay: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How lr goes to min_lr after the warm-up: not at all, in a line, by half a cosine."
    )
    warmup_steps: NonNegativeInt = Field(10, description="Optimizer steps of linear warm-up.")
    decay_steps: PositiveInt | None = Field(
        None, description="Optimizer step at which the decay reaches min_lr; default: the run's last."
    )
    lr_by_lag: LrByLag = Field(
        "none",
        description="sqrt: a batch whose tokens were sampled `age` optimizer steps ago in the mean is learned from at "
        "lr / √(1 + age). ess: at lr × (1 - √(1 - e)), where e is the ESS of what the learner has changed since the "
        "tokens were sampled; needs a pass over each stale batch, and with async the memory of "
        "learner.old_logprobs_at sampling. With the ESS controller, the smaller of both factors holds.",
    )
    betas: tuple[Momentum, Momentum] = Field(
        (0.9, 0.95), description="What stays each step of AdamW's mean of gradients, and of that of their squares."
    )
    eps: PositiveFloat = Field(1e-8, description="AdamW divides by the root of the mean square plus this.")
    weight_decay: float = Field(0.01, ge=0.0, description="AdamW: each step shrinks weights by learning rate × this.")
    clip_grad: float = Field(1.0, ge=0.0, description="Global norm; 0 turns clipping off.")

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.decay != "constant" and self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}, so that the rate would rise; lower it")
        return self


class MegatronSection(Section):
    """Settings of Megatron-Core that no other key decides, by the names of its own classes' fields."""

    on_resume: ClassVar[Changes] = {"*": "free", "optimizer": "never"}

    transformer: dict[str, Any] = Field(
        {}, description="Fields of TransformerConfig, such as recompute_modules, deterministic_mode or cp_comm_type."
    )
    ddp: dict[str, Any] = Field({}, description="Fields of DistributedDataParallelConfig, such as bucket_size.")
    optimizer: dict[str, Any] = Field(
        {}, description="Fields of OptimizerConfig, such as optimizer_cpu_offload or use_precision_aware_optimizer."
    )


class CheckpointSection(Section):
    on_resume: ClassVar[Changes] = {"*": "free"}

    every: PositiveInt = Field(20, description="Steps between checkpoints; the last step always saves.")
    keep: PositiveInt = Field(
        2, description="Newest checkpoints to keep; each has about 14 bytes a parameter in BF16. A fork needs one."
    )


class EvaluationSection(Section):
    on_resume: ClassVar[Changes] = {"*": "free"}

    every: PositiveInt = Field(20, description="Steps between evaluations; the first and the last always run.")
    prompts: PositiveInt = Field(64, description="Held-out prompts; all of them where there are fewer.")
    samples: Samples = Field(8, description="Samples of a prompt: pass@k is known up to this k.")
    temperature: Temperature = Field(1.0, description="Of sampling in evaluations, whatever the rollouts have.")

    @field_validator("temperature", mode="before")
    @classmethod
    def _samples(cls, given: object) -> object:
        if isinstance(given, int | float) and not isinstance(given, bool) and given == 0:
            raise ValueError(
                "there is no greedy evaluation: pass@k is over evaluation.samples different answers; use 0.6 or 1, and "
                "measure a checkpoint by itself for a greedy score (docs/model.md)"
            )
        return given


HIGHEST_PORT = 65_535
RolloutPrecision = Literal[
    "fp32", "bf16", "fp8_tensor", "fp8_block", "emulated_fp6", "emulated_fp4", "emulated_nvfp4", "emulated_mxfp4"
]
MOST_KEPT = 3072
"""Largest top_k with kept sets. SGLang names at most 4096 tokens and ends a request that keeps more; tokens exactly as
likely as the last one are kept too, however many."""


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
    on_resume: ClassVar[Changes] = {
        **dict.fromkeys(("engines", "tensor_parallel", "concurrent_prompts", "urls", "port", "extra_args"), "free"),
        "colocated": "free",
        **dict.fromkeys(("request_deadline_s", "start_deadline_s", "composition", "window"), "free"),
    }

    engines: Processes = Field(1, description="SGLang servers; two or more are reached through SGLang's router.")
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
        2048, description="Most tokens of a response; longer responses are cut. A batch waits for its longest response."
    )
    temperature: Temperature = Field(
        1.0, description="Of sampling: softmax(logits / temperature); evaluation has its own."
    )
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
    concurrent_prompts: PositiveInt = Field(
        64,
        description="The most prompts under way at once over all engines; each gets its share at most. Fewer where an "
        "engine's keys and values are full: more are asked while under 80 % is in use, fewer from 95 % on.",
    )
    composition: Literal["fifo", "window", "ready"] = Field(
        "fifo",
        description="Which groups make up a batch. fifo: those that were asked for it; it waits for the slowest. "
        "window: a finished group of a later batch takes the place of an unfinished one, which falls behind its turn "
        "by at most `window`; then the batch waits. ready: without that bound, so early batches hold short answers. "
        "In each, no group is dropped, and no token is older than the schedule allows.",
    )
    window: float = Field(
        0.3, ge=0.0, le=1e6, description="With composition=window: batches by which a group may fall behind its turn."
    )
    urls: ServerUrls = Field((), description="Engines that are running already: http://HOST:PORT of each.")
    port: int | None = Field(
        None,
        ge=1,
        le=HIGHEST_PORT,
        description="Port of the first engine; other engines take the next ports. Default: any free port.",
    )
    request_deadline_s: PositiveFloat = Field(
        1800.0, description="Most seconds for a request: the longest answer, and a publish."
    )
    start_deadline_s: PositiveFloat = Field(
        600.0,
        description="An engine that takes longer to start is stopped and started again. Also the longest wait for "
        "version 0, and of the hosts of a role for each other.",
    )
    interruption: InterruptionSection | None = Field(
        None, description="ScaleRL: interrupt long responses with a phrase that asks for the answer; default: off."
    )
    colocated: bool = Field(
        False,
        description="Engines and learner take turns on the same GPUs: engines give up the memory of weights, keys and "
        "values while the learner trains, and the learner moves gradients and optimizer state to the host while they "
        "sample. Needs weights.channel ipc and the sync schedule.",
    )
    extra_args: tuple[str, ...] = Field((), description="Further arguments of SGLang; not those that other keys set.")

    @property
    def started_engines(self) -> int:
        """Engines that the run starts: none where `urls` names existing engines."""
        return 0 if self.urls else self.engines

    @property
    def starts_router(self) -> bool:
        return self.started_engines > 1

    @property
    def samples_under_way(self) -> int:
        """Most samples of one batch that engines work on at once."""
        return min(self.prompts_per_batch, self.concurrent_prompts) * self.group_size

    @property
    def quantized_format(self) -> RolloutFormat | None:
        """Quantized format of the engines; None for fp32 and bf16."""
        return None if self.precision in ("fp32", "bf16") else RolloutFormat(self.precision)

    @property
    def asks_for_kept_sets(self) -> bool:
        """Whether sampling is cut and engines report the tokens left."""
        return self.kept_set and (self.top_p < 1.0 or self.top_k != -1)

    @field_validator("quant_map", mode="before")
    @classmethod
    def _read(cls, named: object) -> object:
        """Return the quant map in a named file, so that a run needs no file outside its directory."""
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


class WeightsSection(Section):
    on_resume: ClassVar[Changes] = {"*": "free", "kv_cache": "fork"}

    channel: Literal["disk", "delta", "broadcast", "ipc"] = Field(
        "disk",
        description="disk: engines load a folder. delta: the learner writes the changes since the last version; each "
        "engine's host patches its folder with them while the engine serves, which then loads the folder. broadcast: "
        "learner ranks send to the engines through process groups (gloo on a CPU, NCCL on GPUs). ipc: engines open the "
        "learner's memory; learner and engines run on one machine and see the same GPUs. With the last two the folder "
        "is written in the background, for engines that restart.",
    )
    kv_cache: Literal["recompute", "keep"] = Field(
        "recompute",
        description="Answers under way when their engine takes new weights, as in async. recompute: all their tokens "
        "are read again, so that the next token is the new policy's. keep: they continue on the keys and values of the "
        "old weights, as in PipelineRL and ScaleRL: no token is read twice, but the next tokens belong to no policy; "
        "their ratios show by how much.",
    )
    bucket_mib: PositiveInt = Field(
        256, le=2**16, description="broadcast, ipc: tensors sent together, at most; a rank needs twice as much memory."
    )
    whole_every: PositiveInt = Field(
        16, description="delta: versions between complete folders, with which starting engines begin."
    )
    keep: PositiveInt = Field(2, description="Published policies to keep on disk, besides the served policy.")
    publish_deadline_s: PositiveFloat = Field(600.0, description="Longest wait for an engine to serve new weights.")
    probe_max_gap_nats: PositiveFloat | None = Field(
        None,
        description="An engine whose prefill log-probabilities of the probe differ from the learner's by more than "
        "this, in the mean, gets no requests; from those with its formats emulated, where the learner can. Default: by "
        "rollout.precision.",
    )


class SyncSchedule(Section):
    kind: Literal["sync"] = "sync"


class AsyncSchedule(Section):
    kind: Literal["async"]
    lag: PositiveInt = Field(1, description="Versions that a batch may be behind when it starts.")


class StagedSchedule(Section):
    kind: Literal["staged"]
    updates_per_stage: PositiveInt = Field(8, description="mu: batches that are trained on between two publishes.")


ScheduleSection = Annotated[SyncSchedule | AsyncSchedule | StagedSchedule, Field(discriminator="kind")]
