"""Commands of roles, and that nothing in the user's folder hides what is ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launch.run import starter, train
from launch.run.preflight import check_ports
from launch.run.processes import child_environment
from launch.run.starter import LocalStarter, Unit, gpu_places, metrics_ports, role_command, units_of
from launch.schedulers.slurm.placement import Shape
from pipeline.config.loader import recipe_from
from pipeline.config.recipe import Recipe
from pipeline.data.epochs import claim
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import PortInUseError
from rollout_sglang.server.start import free_port


def a_recipe(root: Path, **rollout: object) -> Recipe:
    data = dict(
        run=dict(name="r", root=str(root), steps=1),
        model=dict(path=str(root)),
        task=dict(name="sort_digits"),
        rollout=rollout,
    )
    return recipe_from(data, source="test")


def test_engines_that_exist_are_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SeenError(Exception):
        """Nothing is started."""

    def supervisor_of(*given: object) -> None:
        raise SeenError(given[5])

    port = free_port()
    recipe = a_recipe(tmp_path, engines=2, urls=["http://a:1", "http://b:1"], port=port)
    units = [Unit("learner"), Unit("collector")]
    assert units_of(recipe) == Shape.of(recipe, 0).units() == units
    assert len(gpu_places(recipe, ("0",)).engines) == 0
    assert metrics_ports(recipe, 9000).keys() == {"supervisor", "learner", "collector"}
    monkeypatch.setattr(train, "Supervisor", supervisor_of)
    monkeypatch.setattr(train, "visible_gpus", lambda: ())
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(SeenError) as seen:
        train._supervise(run, recipe, claim(run.path, "supervisor"), None)
    assert seen.value.args == (units,)


def test_nothing_in_the_user_s_folder_hides_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pipeline.py", "launch.py"):
        (tmp_path / name).write_text("raise SystemExit('a module of the user')")
    monkeypatch.setenv("PYTHONPATH", ":")  # an empty entry is the folder that the program is started in
    command = role_command(RunDirectory(tmp_path / "run"), Unit("collector"), "--help")
    done = subprocess.run(command, env=child_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Ask the engines" in done.stdout


def test_the_collector_alone_is_given_the_teacher_s_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"EVENKEEL_TEACHER_API_KEY", "EVENKEEL_TEACHER_API_KEY_FILE"}
    for name in variables:
        monkeypatch.setenv(name, "theirs")
    given: list[dict[str, str]] = []
    monkeypatch.setattr(starter, "_Child", lambda _, __, environment, **___: given.append(environment))
    here = LocalStarter(RunDirectory(tmp_path), a_recipe(tmp_path, engines=2), "key")
    units = [Unit("engine", 0), Unit("router"), Unit("learner"), Unit("collector")]
    for unit in units:
        here.start(unit, tmp_path / "log")
    assert [variables & set(one) for one in given] == [set(), set(), set(), variables]
    assert all(one["EVENKEEL_API_KEY"] == "key" for one in given)


def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path: Path) -> None:
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} is taken"):
            check_ports(a_recipe(tmp_path, port=port))


def test_each_start_has_another_port_unless_the_recipe_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(starter, "_Child", lambda command, *_, **__: commands.append(command))
    units = [Unit("engine", 0), Unit("engine", 1), Unit("router")]
    drawn = LocalStarter(RunDirectory(tmp_path), a_recipe(tmp_path, engines=2), "key")
    for _ in range(20):
        for unit in units:
            drawn.start(unit, tmp_path / "log")
    ports = [int(command[command.index("--port") + 1]) for command in commands]
    assert all(len(set(ports[place : place + 3])) == 3 for place in range(58)), "no two at a time have the same"
    assert len(set(ports[::3])) > 1
    commands.clear()
    named = LocalStarter(RunDirectory(tmp_path), a_recipe(tmp_path, engines=2, port=free_port()), "key")
    for unit in units * 2:
        named.start(unit, tmp_path / "log")
    assert [int(command[command.index("--port") + 1]) - named._first_port for command in commands] == [0, 1, 2] * 2
