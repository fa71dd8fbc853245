"""Place roles on nodes, by pure functions of the recipe and of the nodes that are up.

A *unit* is the work of one job step: a node's share of the learner, an engine (or a node's share of one), the
collector, the router. Placement is first fit in the order of the units, so the same nodes give the same places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.plan.hosts import check_gpu_hosts_serve
from launch.run.starter import NoRoomError, Unit
from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError


@dataclass(frozen=True)
class Shape:
    """The division of a run into units. Units have 0 GPUs on nodes without GPUs."""

    gpus_per_node: int
    learner_nodes: int
    learner_gpus: int
    """Per node."""
    engines: int
    engine_nodes: int
    """Per engine."""
    engine_gpus: int
    """Per node."""
    router: bool

    @staticmethod
    def of(recipe: Recipe, gpus_per_node: int, learner_nodes: int | None = None) -> Shape:
        """Divide a recipe into units. Raises RecipeError when it does not divide among such nodes or suit them."""
        ranks, rollout = recipe.learner.num_processes, recipe.rollout
        if recipe.weights.channel == "ipc":
            raise RecipeError(
                "weights.channel is ipc, which needs learner and engines on the same GPUs of one machine; use "
                "broadcast or disk, or `evenkeel train`"
            )
        if gpus_per_node:
            check_gpu_hosts_serve(recipe)
        nodes = learner_nodes or (-(-ranks // gpus_per_node) if gpus_per_node else 1)
        if ranks % nodes or (gpus_per_node and ranks // nodes > gpus_per_node):
            raise RecipeError(
                f"the learner's {ranks} processes do not divide among {nodes} nodes of {gpus_per_node} GPUs; change "
                "learner.data_parallel, --learner-nodes or --gpus-per-node"
            )
        spans = -(-rollout.tensor_parallel // gpus_per_node) if gpus_per_node else 1
        if rollout.tensor_parallel % spans:
            raise RecipeError(
                f"rollout.tensor_parallel {rollout.tensor_parallel} does not divide among {spans} nodes of "
                f"{gpus_per_node} GPUs; use a multiple of --gpus-per-node"
            )
        gpus = bool(gpus_per_node)
        return Shape(
            gpus_per_node=gpus_per_node,
            learner_nodes=nodes,
            learner_gpus=gpus * ranks // nodes,
            engines=rollout.started_engines,
            engine_nodes=spans,
            engine_gpus=gpus * rollout.tensor_parallel // spans,
            router=rollout.starts_router,
        )

    def units(self) -> list[Unit]:
        """Return all units, the learner first: its first node shares its fate with the batch script."""
        learner = [Unit("learner", node=node) for node in range(self.learner_nodes)]
        spans = range(self.engine_nodes)
        engines = [Unit("engine", index, node) for index in range(self.engines) for node in spans]
        return [*learner, Unit("collector"), *([Unit("router")] if self.router else []), *engines]

    def gpus(self, unit: Unit) -> int:
        return dict(learner=self.learner_gpus, engine=self.engine_gpus).get(unit.role, 0)

    @property
    def num_nodes(self) -> int:
        """The smallest number of nodes with room for all units."""
        nodes: list[str] = []
        while True:
            nodes.append(f"{len(nodes):06d}")
            try:
                place(self, nodes, {})
            except NoRoomError:
                continue
            return len(nodes)


def place(shape: Shape, up: Sequence[str], kept: Mapping[Unit, str]) -> dict[Unit, str]:
    """Assign each unit a node of `up`; a unit of `kept` stays on its node while that is up. Parts of one learner or
    engine get separate nodes, so a lost node takes only one of them. Raises NoRoomError."""
    places = {unit: node for unit, node in kept.items() if node in up}
    for unit in shape.units():
        if unit not in places:
            places[unit] = _first_with_room(shape, unit, up, places)
    return places


def moved(shape: Shape, unit: Unit, nodes: Sequence[str], places: Mapping[Unit, str]) -> dict[Unit, str]:
    """Return `places` with the unit moved to a node of `nodes` that has room, or unchanged."""
    others = {other: node for other, node in places.items() if other != unit}
    try:
        return {**others, unit: _first_with_room(shape, unit, nodes, others)}
    except NoRoomError:
        return dict(places)


def _first_with_room(shape: Shape, unit: Unit, up: Sequence[str], places: Mapping[Unit, str]) -> str:
    """Return the first node with free GPUs or, without GPUs, the node with the fewest units of the role."""
    used = Counter[str]()
    for other, node in places.items():
        used[node] += shape.gpus(other)
    # Parts of one learner or one engine get separate nodes.
    group = (unit.role, unit.index)
    siblings = {node for other, node in places.items() if (other.role, other.index) == group and other != unit}
    free = [node for node in up if node not in siblings and used[node] + shape.gpus(unit) <= shape.gpus_per_node]
    if not free:
        raise NoRoomError(
            f"{unit.name} has room on none of the nodes that are up ({', '.join(up) or 'none'}); the job needs another"
        )
    if shape.gpus_per_node:
        return free[0]
    spans = unit.role == "learner" or shape.engine_nodes > 1
    in_use = [node for node in free if node in places.values()]
    crowd = Counter(node for other, node in places.items() if other.role == unit.role)
    return min(free if spans or not in_use else in_use, key=lambda node: (crowd[node], node not in in_use))
