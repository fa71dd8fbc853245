"""Score rows in one learner rank: with the weights of each version, plain, in the rollout's formats, with known faults.

Reads RUN/job.json (launch.attribution.rows.ScoringJob), writes RUN/scores.npz: float64 arrays over the response tokens
of their version's rows.

    VERSION.then        the learner                  VERSION.layer.N   … with the formats of layers 0 to N
    VERSION.quantized   … with all formats           VERSION.entropy   of the learner's distribution, nats
    VERSION.routed      … and the engine's experts   (mixtures whose engine reported them)
    now                 … with the trained weights, over all rows
    effect.FAULT        the effect of a known engine fault, made in the learner, on each token of the searched rows:
                        log pi_right - log pi_faulty, nats. The kernels term equals it when the engine has that fault
                        (precision.mismatch.localization)

    full:GROUP      the engine does not quantize these stacked modules, which the map quantizes
    quantized:GROUP the engine quantizes these stacked modules, which the map does not
    full:all        nothing is quantized
    format:FORMAT   … all are in the other FP8 format that engines serve
    weights_only    the weights are quantized, their inputs are not
    scale:MODULE    the module's weights are all off by one factor
    bf16:MODULE     the module's weights are rounded to bfloat16
    former          the engine holds the weights of an earlier version
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from launch.attribution.rows import JOB_FILE, MOST_MODULES, SCORES_FILE, ScoringJob, read_experts, tokens_of
from launch.build.components import build_quant_map
from launch.build.learner import build_learner
from launch.run.processes import run_child
from megatron_bridge.hf.tensor_files import TensorFolder
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.model.te_precision import is_fp8
from megatron_bridge.step.fp8_emulation import emulated, weights_changed
from megatron_bridge.step.host_weights import NamedTensors, changed, rounded, scaled
from megatron_bridge.step.micro_batches import TokenRows
from megatron_bridge.weights import NameMap, load_hf
from pipeline.child_process import die_with_parent
from pipeline.data.batch import KeptSets
from pipeline.data.routed_experts import RoutedExperts
from pipeline.data.run_directory import RunDirectory
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import RolloutFormat
from precision.formats.streams import fake_quantize_state
from precision.mismatch.attribution import TRIED_SCALE
from precision.mismatch.sensitivity import whole_layers

Arrays = dict[str, NDArray[np.float64]]
Scores = NDArray[np.float64]
Score = Callable[[], Scores]
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def score(run: RunDirectory) -> None:
    """Score the job, write the results. Collective."""
    recipe = run.recipe()
    job = ScoringJob.model_validate_json((run.path / JOB_FILE).read_text(encoding="utf-8"))
    # Formats are emulated in Megatron's own layers only; TE's layers are needed to train in FP8.
    learner = build_learner(recipe, layers=None if is_fp8(recipe.learner.precision) else "megatron")
    quant = build_quant_map(recipe) if learner.layers == "megatron" else None
    experts = read_experts(run.path)
    found: Arrays = {}
    for version in job.versions:
        _load(learner, version.weights)
        part = job.part(version.rows)
        chosen = None if experts is None else experts[tokens_of(job.tokens, version.rows)]
        for name, values in version_scores(learner, part, quant, chosen).items():
            found[f"{version.number}.{name}"] = values
    if job.now is not None:
        _load(learner, job.now)
        found["now"], _ = _scored(learner, job, experts if job.replayed else None)
    _keep(run, learner, found)  # the search needs more memory than everything before
    if job.searched:
        if job.now is not None:
            _load(learner, job.versions[-1].weights)
        searched = job.part(job.searched)
        told = None if experts is None else experts[tokens_of(job.tokens, job.searched)]
        suspected = effects(learner, lambda: _scored(learner, searched, told)[0], quant, job.former)
        _keep(run, learner, found | {f"effect.{name}": values for name, values in suspected.items()})


def _keep(run: RunDirectory, learner: MegatronLearner, found: Arrays) -> None:
    """Write the scores atomically. Collective."""
    if learner.is_rank_zero:
        path = run.path / SCORES_FILE
        with path.with_suffix(".part").open("wb") as file:
            np.savez(file, **found)  # type: ignore[arg-type]
        path.with_suffix(".part").replace(path)
    learner.barrier()


def version_scores(
    learner: MegatronLearner, job: ScoringJob, quant: QuantMap | None, experts: RoutedExperts | None
) -> Arrays:
    """Score the rows of a version; `experts` are those of the tokens of the job's rows."""
    told = experts if job.replayed else None
    then, entropy = _scored(learner, job, told)
    found = {"then": then, "entropy": entropy}
    formats = quant if quant is not None and quant.formats else None
    if formats is not None and learner.emulation is not None:  # trained with the formats: no difference
        found["quantized"] = found["then"]
    elif formats is not None:
        below: list[str] = []
        for layer in whole_layers(formats):
            below += layer.modules
            with emulated(learner, formats.only(below)):
                found[f"layer.{layer.name.rpartition('.')[2]}"] = found["quantized"] = _scored(learner, job, told)[0]
    if experts is None:
        return found
    if job.replayed:  # the learner trains with the experts, too
        return found | {"routed": found.get("quantized", found["then"])}
    with nullcontext() if formats is None or learner.emulation is not None else emulated(learner, formats):
        return found | {"routed": _scored(learner, job, experts)[0]}


def _scored(learner: MegatronLearner, job: ScoringJob, experts: RoutedExperts | None) -> tuple[Scores, Scores]:
    """Return log-probabilities and entropy of the responses, over kept sets where there are any."""
    rows = TokenRows(
        tokens=[np.asarray(row, np.int32) for row in job.tokens],
        starts=np.asarray(job.prompt_lengths, np.int64),
        kept=None if job.kept is None else KeptSets.of(job.kept),
        experts=experts,
    )
    scored = learner.score_rows(rows)
    return scored.logprobs.double().cpu().numpy(), scored.entropy.double().cpu().numpy()


def _load(learner: MegatronLearner, folder: Path) -> None:
    load_hf([chunk.module for chunk in learner.model], learner.model_config, folder)
    weights_changed(learner.emulation)


def effects(learner: MegatronLearner, score: Score, quant: QuantMap | None, former: Path | None) -> dict[str, Scores]:
    """Return the effect [tokens] of each fault. `score()` returns the current learner's log-probabilities [tokens];
    `former` is an HF folder of an earlier version. Collective."""

    def score_as_engine(served: QuantMap | None = quant) -> Scores:
        with emulated(learner, served if served is not None and served.formats else None):
            return score()

    def with_weights(change: Callable[[NamedTensors], NamedTensors]) -> Scores:
        with changed(learner, change):
            return right - score_as_engine()

    right = score_as_engine()
    # Every linear module, or every layer in a model with many modules.
    sizes = NameMap(learner.model_config).tensors
    modules = [name.removesuffix(".weight") for name, size in sizes.items() if len(size) > 1]
    modules = [module for module in modules if module != EMBEDDING]
    if len(modules) > MOST_MODULES:
        modules = list(dict.fromkeys(re.sub(r"(\.layers\.\d+)\..*", r"\1", module) for module in modules))
    found = {f"scale:{module}": with_weights(scaled(module, TRIED_SCALE)) for module in modules}
    if not learner.model_config.tied_embeddings:
        found[f"bf16:{HEAD}"] = with_weights(rounded(HEAD, torch.bfloat16))
    if former is not None:
        folder = TensorFolder(former)
        found["former"] = with_weights(lambda _: folder.tensors())
    if quant is not None and quant.rollout_format is not None:
        for fault, other in other_maps(quant, quant.rollout_format):
            found[fault] = right - score_as_engine(other)
        with changed(learner, lambda tensors: fake_quantize_state(tensors, quant)), emulated(learner, None):
            found["weights_only"] = right - score()
    return found


def other_maps(quant: QuantMap, usual: RolloutFormat) -> Iterator[tuple[str, QuantMap]]:
    """Yield the maps of known faults: everything or one group in full precision, or in another format."""
    yield "full:all", quant.only(())
    by_layer = len(quant.fused_groups) > MOST_MODULES
    groups = {layer.name: layer.modules for layer in whole_layers(quant)} if by_layer else quant.groups
    for name, modules in groups.items():
        if any(module in quant.formats for module in modules):
            yield f"full:{name}", quant.promoted(modules)
        else:
            yield f"quantized:{name}", quant.promoted(modules, to=usual)
    for other in RolloutFormat:  # an enumeration has the same order on all ranks, a set does not
        if other.is_served and not other.is_emulated and other is not usual:
            yield f"format:{other}", quant.promoted(quant.formats, to=other)


if __name__ == "__main__":
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "mismatch", lambda: score(directory))
