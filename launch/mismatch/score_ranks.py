"""One rank of an attribution: score rows with the weights of each version, plainly and with the rollout's formats.

Reads RUN/job.json (launch.mismatch.scoring.Job), writes RUN/scores.npz: float64 arrays, each over the response tokens
of the rows of its version.

    VERSION.then        the learner                  VERSION.layer.N   … with the formats of layers 0 to N
    VERSION.quantized   … with all formats           VERSION.entropy   of the learner's distribution, nats
    VERSION.routed      … and the engine's experts   (of mixtures, where the engine said which)
    now                 … with the weights that are trained, over all rows
    effect.FAULT        launch.mismatch.suspected, over the rows that are searched for faults
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from launch.build.components import build_quant_map
from launch.mismatch.rows import tokens_of
from launch.mismatch.scoring import SCORES_FILE, Job, read_experts
from launch.mismatch.suspected import effects
from launch.run.learn import build_learner
from launch.run.processes import run_child
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.model.te_precision import is_fp8
from megatron_bridge.step.fp8_emulation import emulated, weights_changed
from megatron_bridge.step.micro_batches import TokenRows
from megatron_bridge.weights.convert import load_hf
from pipeline.child_process import die_with_parent
from pipeline.data.batch import KeptSets
from pipeline.data.routed_experts import RoutedExperts
from pipeline.data.run_directory import RunDirectory
from precision.formats.quant_map import QuantMap
from precision.mismatch.sensitivity import whole_layers

Arrays = dict[str, NDArray[np.float64]]


def score(run: RunDirectory) -> None:
    """Write the scores of the job. Collective."""
    recipe, job = run.recipe(), Job.read(run.path)
    # Formats are emulated in Megatron's own layers, also where there are others. Only those of TE train in FP8.
    learner = build_learner(recipe, layers=None if is_fp8(recipe.learner.precision) else "megatron")
    quant = build_quant_map(recipe) if learner.layers == "megatron" else None
    experts = read_experts(run.path)
    found: Arrays = {}
    for version in job.versions:
        _load(learner, version.weights)
        part = job.part(version.rows)
        chosen = None if experts is None else experts[tokens_of(job.tokens, version.rows)]
        for name, values in _version_scores(learner, part, quant, chosen).items():
            found[f"{version.number}.{name}"] = values
    if job.now is not None:
        _load(learner, job.now)
        found["now"] = _plain(learner, job, experts if job.replayed else None)
    _keep(run, learner, found)  # the search needs more memory than all before it
    if job.searched:
        if job.now is not None:
            _load(learner, job.versions[-1].weights)
        searched = job.part(job.searched)
        told = None if experts is None else experts[tokens_of(job.tokens, job.searched)]
        suspected = effects(learner, lambda: _plain(learner, searched, told), quant, job.former)
        _keep(run, learner, found | {f"effect.{name}": values for name, values in suspected.items()})


def _keep(run: RunDirectory, learner: MegatronLearner, found: Arrays) -> None:
    """Write the scores whole or not at all. Collective."""
    if learner.is_rank_zero:
        path = run.path / SCORES_FILE
        with path.with_suffix(".part").open("wb") as file:
            np.savez(file, **found)  # type: ignore[arg-type]
        path.with_suffix(".part").replace(path)
    learner.barrier()


def _version_scores(
    learner: MegatronLearner, job: Job, quant: QuantMap | None, experts: RoutedExperts | None
) -> Arrays:
    """`experts` are those of the tokens of the job's rows."""
    told = experts if job.replayed else None
    scored = learner.score_rows(_rows(job, told))
    found = {"then": _float64(scored.logprobs), "entropy": _float64(scored.entropy)}
    formats = quant if quant is not None and quant.formats else None
    if formats is not None and learner.emulation is not None:  # the learner trains with them: they are no difference
        found["quantized"] = found["then"]
    elif formats is not None:
        below: list[str] = []
        for layer in whole_layers(formats):
            below += layer.modules
            with emulated(learner, formats.only(below)):
                found[f"layer.{layer.name.rpartition('.')[2]}"] = found["quantized"] = _plain(learner, job, told)
    if experts is None:
        return found
    if job.replayed:  # the learner trains with them, too
        return found | {"routed": found.get("quantized", found["then"])}
    with nullcontext() if formats is None or learner.emulation is not None else emulated(learner, formats):
        return found | {"routed": _plain(learner, job, experts)}


def _plain(learner: MegatronLearner, job: Job, experts: RoutedExperts | None = None) -> NDArray[np.float64]:
    return _float64(learner.score_rows(_rows(job, experts)).logprobs)


def _rows(job: Job, experts: RoutedExperts | None) -> TokenRows:
    """With the responses to be predicted, over kept sets where there are any."""
    return TokenRows(
        tokens=[np.asarray(row, np.int32) for row in job.tokens],
        starts=np.asarray(job.prompt_lengths, np.int64),
        kept=None if job.kept is None else KeptSets.of(job.kept),
        experts=experts,
    )


def _float64(flat: Tensor) -> NDArray[np.float64]:
    values: NDArray[np.float64] = flat.double().cpu().numpy()
    return values


def _load(learner: MegatronLearner, folder: Path) -> None:
    load_hf([chunk.module for chunk in learner.model], learner.model_config, folder)
    weights_changed(learner.emulation)


if __name__ == "__main__":
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "mismatch", lambda: score(directory))
