"""The declared matrix: models, experiments, conditions, arms, seeds → cells. A cell is one `evenkeel train` command.

    model        one warmed-up model: a recipe, overrides, steps of `evenkeel sft`
    experiment   one question: a model, overrides, conditions × arms × seeds, what to show, which claims to judge
    cell         experiment + condition + arm + seed = recipe + overrides = one run directory

Overrides add up from the model to the arm; a later one wins. Reading a matrix starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from pipeline.config.loader import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.config.sections import Section
from pipeline.errors import RecipeError

REPOSITORY = Path(__file__).parents[2]

Overrides = dict[str, Any]
"""Recipe keys such as `rollout.temperature`, or whole sections such as `objective`."""


class Model(Section):
    """A model made by `evenkeel model new` (the base, common to all) and `evenkeel sft`."""

    recipe: Path
    steps: PositiveInt
    batch_size: PositiveInt = 32
    set: Overrides = Field(default_factory=dict)


class Variant(Section):
    """A condition or an arm: what the page calls it, and its overrides."""

    title: str
    set: Overrides = Field(default_factory=dict)


class Decays(Section):
    """The arm ends clearly below its best evaluation (`shown`), or it keeps it (`refuted`)."""

    kind: Literal["decays"]
    arm: str


class Holds(Section):
    """The arm ends about as high as its best evaluation, and above its start."""

    kind: Literal["holds"]
    arm: str


class Better(Section):
    """Held-out pass@k of `arm` at the end lies above that of `than`, or of every other arm where that is left out."""

    kind: Literal["better"]
    arm: str
    than: str | None = None
    pass_at: PositiveInt = 1


class Faster(Section):
    """`arm` gets to the experiment's target with less than `than` needs, in updates' samples or in seconds."""

    kind: Literal["faster"]
    arm: str
    than: str
    cost: Literal["samples", "seconds"]


class Forecast(Section):
    """The curve fitted to the first `share` of the run of `arm` foretells its end."""

    kind: Literal["forecast"]
    arm: str
    share: PositiveFloat


class Order(Section):
    """Which of `arm` and `than` is ahead at `share` of the run is also ahead at its end."""

    kind: Literal["order"]
    arm: str
    than: str
    share: float = Field(gt=0.0, lt=1.0)


COMPARING = (Better, Faster, Order)
"""Judges that look at other arms too."""


class Claim(Section):
    """A sentence of a paper, or of our own, and the rule that judges it in each condition."""

    text: str
    source: str
    judge: Annotated[Decays | Holds | Better | Faster | Forecast | Order, Field(discriminator="kind")]
    conditions: tuple[str, ...] | None = Field(None, description="Where it is judged; default: in all.")

    @property
    def named_arms(self) -> set[str]:
        """The arms that are judged."""
        than = self.judge.than if isinstance(self.judge, COMPARING) else None
        return {self.judge.arm} | ({than} if than else set())


class Experiment(Section):
    """One question and all that is needed to answer it."""

    title: str
    text: str
    model: str
    set: Overrides = Field(default_factory=dict)
    conditions: dict[str, Variant]
    arms: dict[str, Variant]
    seeds: tuple[int, ...]
    more: dict[str, dict[str, tuple[int, ...]]] = Field(
        default_factory=dict, description="Condition → arm → further seeds, where a verdict hangs on few runs."
    )
    target: float | None = Field(None, gt=0.0, lt=1.0, description="Held-out pass@1 whose price is compared.")
    alone: bool = Field(False, description="Its cells run one at a time, because their seconds are compared.")
    pass_at: tuple[PositiveInt, ...] = Field((1,), description="Each k whose pass@k is tabled and drawn.")
    series: tuple[str, ...] = Field(description="Metrics of each step that are kept, and drawn.")
    claims: tuple[Claim, ...] = ()
    quick: dict[str, Any] | None = Field(
        default_factory=dict, description="Fields that `--quick` replaces; `set` is added. Null: it is left out."
    )

    def runs(self) -> Iterator[tuple[int, str, str]]:
        """Seed, condition and arm of each, those of `more` at the end."""
        yield from product(self.seeds, self.conditions, self.arms)
        for condition, arms in self.more.items():
            yield from ((seed, condition, arm) for arm, seeds in arms.items() for seed in seeds)

    def others(self, claim: Claim) -> list[str]:
        """The arms that a comparison is with."""
        than = claim.judge.than if isinstance(claim.judge, COMPARING) else None
        return [than] if than else [arm for arm in self.arms if arm != claim.judge.arm]

    def quickened(self) -> Self:
        """The same question, asked of less."""
        fields: dict[str, Any] = {"more": {}, **(self.quick or {})}
        kept = {key: fields.pop(key, list(getattr(self, key))) for key in ("conditions", "arms")}
        for key, names in kept.items():
            fields[key] = {name: getattr(self, key)[name] for name in names}
        fields["set"] = {**self.set, **fields.get("set", {})}
        fields["claims"] = tuple(
            claim
            for claim in self.claims
            if claim.named_arms <= set(kept["arms"]) and set(claim.conditions or ()) <= set(kept["conditions"])
        )
        return type(self).model_validate({**dict(self), **fields})


class Matrix(Section):
    """The whole declaration, as `matrix.yaml` holds it."""

    models: dict[str, Model]
    experiments: dict[str, Experiment]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: `name` is its directory below `root`."""

    experiment: str
    condition: str
    arm: str
    seed: int
    recipe: Path
    overrides: tuple[str, ...]
    """`key=value`, as `--set` takes them; run.name, run.root, run.seed and model.path are among them."""
    root: Path

    @property
    def name(self) -> str:
        return f"{self.experiment}-{self.condition}-{self.arm}-s{self.seed}"

    @property
    def directory(self) -> Path:
        return self.root / self.name

    def resolved(self) -> Recipe:
        """The recipe that the command trains. Raises RecipeError."""
        return load_recipe(self.recipe, self.overrides)


def read_matrix(path: Path, *, quick: bool = False) -> Matrix:
    """Read and check a matrix. Raises RecipeError naming every offending key."""
    try:
        matrix = Matrix.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        if not quick:
            return matrix
        asked = {name: one.quickened() for name, one in matrix.experiments.items() if one.quick is not None}
        return matrix.model_copy(update=dict(experiments=asked))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise RecipeError(f"{path}: {problems}") from None


def cells_of(matrix: Matrix, name: str, root: Path) -> Iterator[Cell]:
    """Every cell of one experiment, seed by seed, so that an interrupted matrix has whole comparisons."""
    experiment = matrix.experiments[name]
    model = matrix.models[experiment.model]
    for seed, condition, arm in experiment.runs():
        identity = f"{name}-{condition}-{arm}-s{seed}"
        run = {
            "run.name": identity,
            "run.root": str(root),
            "run.seed": seed,
            "model.path": str(model_folder(root, experiment.model)),
        }
        where, what = experiment.conditions[condition], experiment.arms[arm]
        yield Cell(
            experiment=name,
            condition=condition,
            arm=arm,
            seed=seed,
            recipe=REPOSITORY / model.recipe,
            overrides=as_overrides({**model.set, **experiment.set, **where.set, **what.set, **run}),
            root=root,
        )


def model_folder(root: Path, name: str) -> Path:
    """Where the warmed-up model lies."""
    return root / "models" / name


def as_overrides(values: Mapping[str, Any]) -> tuple[str, ...]:
    """`key=value` of each; JSON is YAML that `--set` reads."""
    return tuple(f"{key}={json.dumps(value)}" for key, value in values.items())
