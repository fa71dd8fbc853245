"""Causes of mismatch, planted in a real engine or beside it, and what `evenkeel mismatch` must say of each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from safetensors.torch import load_file, save_file

import launch.attribution.measure as attribution
from launch.attribution.engine import MeasuredEngine
from launch.attribution.measure import measure
from launch.run.preflight import seed_policy
from pipeline.analysis.mismatch import ROUNDING_NATS, tied_suspects
from pipeline.config.loader import recipe_from
from pipeline.config.recipe import Recipe
from pipeline.data.run_directory import RunDirectory
from pipeline.ports.weights import WEIGHT_CHECK_FILE
from tests.support.engine_faults import engine_fault

LAYER = "model.layers.1"
Planting = Callable[["Models"], AbstractContextManager[None]]


@dataclass(frozen=True)
class Models:
    """HF folders of one architecture."""

    served: Path
    """What the engine should serve."""
    other: Path
    """Another version of it."""


@dataclass(frozen=True)
class Plant:
    """One cause."""

    name: str
    term: str
    """The term that must be larger than rounding explains, though others may be larger; "" where none must."""
    cause: str
    """What must be named, as findings name it (pipeline.analysis.mismatch)."""
    where: str = ""
    """The module that must be among the places named."""
    planted: Planting = lambda _: nullcontext()
    suspect: str = ""
    """What the scores alone must say, without asking the engine what it holds."""
    sets: tuple[str, ...] = ()
    """Overrides of the recipe."""
    old_policy: bool = False
    """Whether the learner has moved on to the other version."""


def fault(what: str) -> Planting:
    """In the engine's own process."""
    return lambda _: engine_fault(what)


def served_otherwise(**rollout: Any) -> Planting:
    """The engine, and the folder that it loads, are made by another recipe than the learner's."""

    @contextmanager
    def planted(_: Models) -> Iterator[None]:
        def other(recipe: Recipe) -> Recipe:
            data = recipe.model_dump(mode="json")
            return recipe_from({**data, "rollout": {**data["rollout"], **rollout}}, source="a planted cause")

        class Engine(MeasuredEngine):
            def __init__(self, run: RunDirectory, recipe: Recipe) -> None:
                super().__init__(run, other(recipe))
                self._right = recipe

            async def verify(self) -> None:
                self.recipe = self._right  # by which it is audited
                await super().verify()

        with (
            patch.object(attribution, "seed_policy", lambda run, recipe: seed_policy(run, other(recipe))),
            patch.object(attribution, "MeasuredEngine", Engine),
        ):
            yield

    return planted


def folder_changed(change: Callable[[Path, Models, RunDirectory, Recipe], None]) -> Planting:
    """What the engine loads is changed after its checksums were worked out."""

    @contextmanager
    def planted(models: Models) -> Iterator[None]:
        def seed(run: RunDirectory, recipe: Recipe) -> None:
            seed_policy(run, recipe)
            change(run.policy_directory(0), models, run, recipe)

        with patch.object(attribution, "seed_policy", seed):
            yield

    return planted


def _stored_scale(folder: Path, *_: object) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[f"{LAYER}.mlp.down_proj.weight_scale_inv"] *= 1.25
    save_file(tensors, file, metadata={"format": "pt"})


def _rope(folder: Path, *_: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    for place in (config, config.get("rope_parameters") or {}):
        if "rope_theta" in place:
            place["rope_theta"] = 3.0 * place["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))


def _lost_update(folder: Path, models: Models, run: RunDirectory, recipe: Recipe) -> None:
    """The engine goes on with the other version under this one's name."""
    check = (folder / WEIGHT_CHECK_FILE).read_bytes()
    other = RunDirectory(run.path / "other")
    other.make_folders()
    data = recipe.model_dump(mode="json")
    seed_policy(other, recipe_from({**data, "model": {**data["model"], "path": str(models.other)}}, source="planted"))
    shutil.rmtree(folder)
    shutil.move(other.policy_directory(0), folder)
    (folder / WEIGHT_CHECK_FILE).write_bytes(check)


GROUP = f"{LAYER}.mlp.gate_up_proj"
EXCEPTIONS = {f"{LAYER}.mlp.{part}_proj": "full" for part in ("gate", "up")}
HEAD = "lm_head"

ONLY = "weights_only"
DOWN, OUT = f"{LAYER}.mlp.down_proj", f"{LAYER}.self_attn.o_proj"

PLANTS = (
    Plant("nothing but block FP8", "quantization", "quantization"),
    Plant("float32 rollouts", "", "", sets=("rollout.precision=fp32",)),
    Plant("the engine serves an older policy", "staleness", "staleness", old_policy=True),
    Plant("the sampler divides by 1.2 × the temperature", "decoding", "temperature", planted=fault("temperature 1.2")),
    Plant(
        "one layer's gate and up in full precision",
        "kernels",
        "audit",
        f"{LAYER}.mlp.gate_proj",
        served_otherwise(quant_map=dict(base="fp8_block", exceptions=EXCEPTIONS)),
        suspect=f"full:{GROUP}",
    ),
    Plant(
        "one module's stored scales × 1.25",
        "kernels",
        "checksums",
        DOWN,
        folder_changed(_stored_scale),
        suspect=f"scale:{DOWN}",
    ),
    Plant(
        "one module's weights × 1.25 after loading, its parameters right",
        "kernels",
        "audit",
        OUT,
        fault(f"scale {OUT} 1.25"),
        suspect=f"scale:{OUT}",
    ),
    Plant("cached values rounded to e4m3 while decoding", "decoding", "decoding", planted=fault("decode_attention")),
    Plant(
        "activations not quantized", "kernels", "weights_only", planted=fault("weights_only"), suspect="weights_only"
    ),
    Plant("the LM head in bfloat16", "kernels", "checksums", HEAD, fault("bf16_head"), suspect=f"bf16:{HEAD}"),
    Plant(
        "per-tensor in place of block FP8",
        "kernels",
        "audit",
        DOWN,
        served_otherwise(precision="fp8_tensor"),
        suspect="format:fp8_tensor",
    ),
    Plant("no quantization at all", "kernels", "audit", DOWN, served_otherwise(precision="fp32"), suspect="full:all"),
    Plant("a weight update that was lost", "kernels", "checksums", planted=folder_changed(_lost_update)),
    Plant("another RoPE base in the engine's config", "kernels", "kernels", planted=folder_changed(_rope)),
)


def measured_plant(plant: Plant, models: Models, out: Path, *, num_prompts: int, sets: Sequence[str] = ()) -> Any:
    """What `evenkeel mismatch demo --json` prints with the cause planted. Engines must be forked
    (tests.support.engine_forks)."""
    with plant.planted(models):
        return measure(
            Path("demo"),
            [f"model.path={models.served}", *sets, *plant.sets],
            out=out,
            num_prompts=num_prompts,
            now=models.other if plant.old_policy else None,
            batch=None,
            locate=plant.term == "kernels",
        )


def is_named(plant: Plant, result: Mapping[str, Any]) -> bool:
    """Whether the first finding is the planted cause, at its place, the scores alone say the same, and the cause shows
    in its term."""
    cause = result["cause"]
    if not plant.cause or cause is None:
        return not plant.cause and cause is None
    if result["terms"][plant.term]["mean_abs"] <= ROUNDING_NATS["float32"]:
        return False
    there = not plant.where or place(plant, result) is not None
    return cause["cause"] == plant.cause and there and (not plant.suspect or plant.suspect in said_by_scores(result))


def place(plant: Plant, result: Mapping[str, Any]) -> str | None:
    """The planted place as the first finding names it: a module, or a parameter of it."""
    places = [] if result["cause"] is None else result["cause"]["where"]
    return next((named for named in places if plant.where and named.startswith(plant.where)), None)


def said_by_scores(result: Mapping[str, Any]) -> list[str]:
    """The best suspects of the kernels term."""
    return [str(one["name"]) for one in tied_suspects(result)]
