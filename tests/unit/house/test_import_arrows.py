"""The house: who may import whom, no circles, rooms of a size that one can look over, and what must stay light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROOMS = ("precision", "pipeline", "megatron_bridge", "rollout_sglang", "launch")
ADAPTERS_MAY_USE = tuple(
    f"pipeline.{name}"
    for name in [
        "background",
        "child_process",
        "config.recipe",
        "config.sections",
        "data.batch",
        "data.batch_values",
        "data.checksums",
        "data.deltas",
        "data.epochs",
        "data.files",
        "data.membership",
        "data.quant_maps",
        "data.routed_experts",
        "data.run_directory",
        "episodes.episode",
        "errors",
        "gpu_needs",
        "importing",
        "nccl",
        "ports",
        "spans",
    ]
)
"""Of `pipeline`, what a learner and an engine may know: modules, or rooms with all that is in them."""
LOOPS = ("pipeline.rollout.collector", "pipeline.trainer.loop")
WORKERS_ALONE = ("pipeline.rewards.mathematics", "pipeline.episodes.mcp_servers")
"""Loaded by the processes that run math_verify or MCP servers, and by nothing else when it is imported."""
HEAVY = {"torch", "transformers", "megatron", "sglang", "math_verify", "sympy", "tensorboard", "wandb", "mcp"}


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(file): file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))}


def imports_of(source: str, *, when_loaded: bool = False) -> set[str]:
    """Dotted names of our own modules that a source imports, wherever in the file it does, but for annotations alone;
    `when_loaded`: at once."""
    found: set[str] = set()
    for node in nodes(ast.parse(source), of_functions=not when_loaded):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= submodules or {node.module}
    return {name for name in found if name.split(".")[0] in ROOMS}


def nodes(tree: ast.AST, *, of_functions: bool) -> Iterator[ast.AST]:
    """All nodes but those in `if TYPE_CHECKING`, and those in functions or without them."""
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not typing_only and (of_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield node
            yield from nodes(node, of_functions=of_functions)


def is_in(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def may_import(module: str, name: str) -> bool:
    """The arrows of the house, and those between the rooms of `pipeline` that keep it in order."""
    room, target = module.split(".")[0], name.split(".")[0]
    if is_in(name, ("pipeline.analysis",)) and is_in(module, ("pipeline",)):
        return is_in(module, ("pipeline.analysis",))  # people read it; no loop takes a decision from it
    if is_in(module, ("pipeline.ports", "pipeline.data")) and target == "pipeline":
        allowed = ("pipeline.ports", "pipeline.data", "pipeline.config", "pipeline.errors", "pipeline.schedule")
        return is_in(name, allowed)
    if is_in(module, ("pipeline.config",)) and target == "pipeline":
        return is_in(name, ("pipeline.config", "pipeline.advantages", "pipeline.errors", "pipeline.schedule"))
    if room in ("megatron_bridge", "rollout_sglang"):
        return target in (room, "precision") or is_in(name, ADAPTERS_MAY_USE)
    if room == "launch":
        return target != "launch" or may_import_in_launch(module, name)
    return target == room or (room, target) == ("pipeline", "precision")


TOOLS = tuple(
    f"launch.{name}"
    for name in [
        "attribution",
        "convert",
        "doctor",
        "export",
        "fork",
        "plan",
        "plugins",
        "quant_map",
        "repair",
        "show",
        "verify",
    ]
)


def may_import_in_launch(module: str, name: str) -> bool:
    """commands → tools, schedulers, roles → run → build: nothing leads back. Tools may use tools, and schedulers the
    plan; roles know neither. What every command has is in launch.terminal and launch.exit_codes, which know nobody."""
    common = ("launch.terminal", "launch.exit_codes")
    if is_in(name, common):
        return not is_in(module, ("launch.build",))
    if is_in(module, common):
        return False
    if is_in(module, ("launch.build",)):
        return is_in(name, ("launch.build",))
    if is_in(module, ("launch.run",)):
        return is_in(name, ("launch.run", "launch.build"))
    below: tuple[str, ...] = ("launch.run", "launch.build")
    if is_in(module, ("launch.schedulers",)):
        return is_in(name, (*below, "launch.schedulers", "launch.plan"))
    if is_in(module, ("launch.roles",)):
        return is_in(name, (*below, "launch.roles"))
    if is_in(module, TOOLS):
        return is_in(name, (*below, *TOOLS))
    return is_in(module, ("launch.cli", "launch.library"))


@pytest.mark.parametrize("room", ROOMS)
def test_arrows(room: str) -> None:
    mine = {module: file for module, file in MODULES.items() if is_in(module, (room,))}
    assert mine
    broken = {
        module: [name for name in sorted(imports_of(file.read_text())) if not may_import(module, name)]
        for module, file in mine.items()
    }
    assert {module: names for module, names in broken.items() if names} == {}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Every group of modules that reach one another (Tarjan's strongly connected components of more than one)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for target in graph[module] & graph.keys():
            if target not in order:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], order[target])
        if low[module] == order[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in graph:
        if module not in order:
            visit(module)
    return found


def test_no_circles() -> None:
    assert circles({module: imports_of(file.read_text()) - {module} for module, file in MODULES.items()}) == []


def test_no_process_takes_a_decision_from_the_logs() -> None:
    """metrics and events are for people: whoever runs the loops reads neither."""
    running = ("pipeline.rollout", "pipeline.trainer", "megatron_bridge", "rollout_sglang", "launch.build")
    running += tuple(f"launch.run.{program}" for program in ("train", "supervisor", "collect", "learn", "replay"))
    readers = [
        module
        for module, file in MODULES.items()
        if is_in(module, running) and {"read_events", "read_metrics"} & set(re.findall(r"\w+", file.read_text()))
    ]
    assert readers == []


def modules_after(*modules: str) -> set[str]:
    """Top-level packages that are loaded once these modules are."""
    code = f"import sys, {', '.join(modules)}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_the_run_itself_needs_no_heavy_stack() -> None:
    """`pipeline` reads a run directory anywhere, and the command line answers at once: neither loads torch."""
    light = [module for module in MODULES if is_in(module, ("pipeline",)) and module not in (*LOOPS, *WORKERS_ALONE)]
    assert modules_after("launch.cli", *light) & HEAVY == set()


def test_no_module_of_the_users_hides_the_program_that_is_started() -> None:
    """`python -m` looks in the folder that it is started in first, and a `pipeline.py` may lie there."""
    started = [
        (name, before)
        for name, file in MODULES.items()
        for before in re.findall(r'(\S+ )"-m", (?!module, \*arguments)', file.read_text(encoding="utf-8"))
    ]
    assert len(started) >= 7
    assert [name for name, before in started if before != '"-P", '] == []
