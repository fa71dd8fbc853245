"""Every learner layout of a number of GPUs: which fit, how fast each should be, and why the others do not.

Ranked by seconds a step under the recipe's schedule, then by the learner's seconds, both by roofline
(launch.plan.costs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from launch.plan.costs import GPUS_PER_NODE
from launch.plan.footprint import GIB, Footprint, Workload, worst_footprint
from launch.plan.simulation import Durations
from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.parallel.layout_checks import check_layout, check_longest_sample
from pipeline.config.recipe import LearnerSection
from pipeline.errors import LayoutError

MIN_CONTEXT_SHARE = 8192
"""Tokens: context parallelism is tried only while each rank keeps that many of the longest sample."""
VIRTUAL = (1, 2, 4)

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One layout. `seconds` and `footprint` are None when the sizes refuse it; `reason` is empty when it fits."""

    learner: LearnerSection
    footprint: Footprint | None
    reason: str
    step_s: float | None = None
    """Seconds a step under the recipe's schedule."""
    durations: Durations | None = None

    @property
    def fits(self) -> bool:
        return not self.reason


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a layout is judged by."""

    hf_config: Mapping[str, Any]
    config: ModelConfig
    gpu_bytes: float
    samples: int
    context_tokens: int
    work: Callable[[LearnerSection], Workload]
    """Layout → footprint.Workload."""
    durations: Callable[[LearnerSection], Durations]
    step_s: Callable[[Durations], float]

    def judge(self, learner: LearnerSection) -> Verdict:
        """Fits or not, and why; with the seconds when it does."""
        reason = self._refused(learner)
        if reason:
            return Verdict(learner=learner, footprint=None, reason=reason)
        footprint = worst_footprint(self.config, learner, self.work(learner))
        reason = shortage(footprint, self.gpu_bytes)
        if reason:
            return Verdict(learner=learner, footprint=footprint, reason=reason)
        durations = self.durations(learner)
        return Verdict(
            learner=learner, footprint=footprint, reason="", durations=durations, step_s=self.step_s(durations)
        )

    def _refused(self, learner: LearnerSection) -> str:
        try:
            check_layout(self.hf_config, learner)
            check_longest_sample(learner, self.context_tokens)
        except LayoutError as error:
            return str(error).partition(";")[0]
        if self.samples < learner.data_parallel:
            return f"{self.samples} samples a step are too few for data_parallel {learner.data_parallel}"
        return ""

    def best_recompute(self, learner: LearnerSection) -> Verdict:
        """The layout with the least recomputation that fits; when none does, the verdict on full recomputation."""
        verdict = self.judge(learner)
        for mode in get_args(Recompute):
            verdict = self.judge(learner.model_copy(update=dict(recompute=mode)))
            if verdict.fits:
                break
        return verdict

    def all(self, learner: LearnerSection, num_gpus: int) -> tuple[list[Verdict], list[Verdict]]:
        """(those that fit, fastest first; the others) of every layout that uses exactly `num_gpus`."""
        verdicts = [self.best_recompute(one) for one in self.candidates(learner, num_gpus)]
        fitting = [one for one in verdicts if one.step_s is not None]
        fitting.sort(key=_speed)
        return fitting, [one for one in verdicts if not one.fits]

    def candidates(self, learner: LearnerSection, num_gpus: int) -> Iterator[LearnerSection]:
        """Tensor parallel within a node and always with sequence parallelism; what `learner` says elsewhere stays."""
        for tensor in (size for size in _powers(GPUS_PER_NODE) if num_gpus % size == 0):
            for context in _powers(num_gpus // tensor):
                if num_gpus % (tensor * context) or (context > 1 and self.context_tokens < context * MIN_CONTEXT_SHARE):
                    continue
                for stages in _divisors(num_gpus // (tensor * context), self.config.num_layers):
                    base = dict(
                        tensor_parallel=tensor,
                        sequence_parallel=tensor > 1,
                        context_parallel=context,
                        pipeline_parallel=stages,
                        data_parallel=num_gpus // (tensor * context * stages),
                    )
                    for virtual, experts in self._finer(tensor, context, stages, base["data_parallel"]):
                        finer = dict(virtual_pipeline=virtual, expert_parallel=experts, expert_tensor_parallel=1)
                        yield learner.model_copy(update=base | finer)

    def _finer(self, tensor: int, context: int, stages: int, data: int) -> Iterator[tuple[int, int]]:
        for virtual in VIRTUAL if stages > 1 else (1,):
            if virtual > 1 and self.config.num_layers % (stages * virtual):
                continue
            ranks = tensor * context * data
            most = 1 if self.config.experts is None else min(self.config.experts.count, ranks)
            yield from ((virtual, experts) for experts in _powers(most) if ranks % experts == 0)


def _speed(one: Verdict) -> tuple[float, float]:
    """Sorts by seconds a step. Where the engines set the pace these are equal: then by seconds of the learner."""
    assert one.step_s is not None
    assert one.durations is not None
    return round(one.step_s, 3), one.durations.score_s + one.durations.update_s


def shortage(footprint: Footprint, gpu_bytes: float) -> str:
    """Why a rank does not fit, in one line; empty when it does."""
    over = footprint.total - gpu_bytes
    if over <= 0:
        return ""
    name, size = max(footprint.items().items(), key=lambda item: item[1])
    return (
        f"{over / GIB:.1f} GiB over: needs {footprint.total / GIB:.1f}, the most of it {name} ({size / GIB:.1f}), "
        f"on stage {footprint.stage}"
    )


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]


def _divisors(number: int, most: int) -> list[int]:
    return [one for one in range(1, min(number, most) + 1) if number % one == 0]
