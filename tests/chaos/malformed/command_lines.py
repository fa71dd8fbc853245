"""Command lines: every command and option that starts no engine and no learner,
with arguments that are something else.

Commands that would start processes get a recipe, a run or a model that is none, so that they have to refuse it first.
"""

from __future__ import annotations

import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import typer

from launch.cli import app
from tests.chaos.malformed.mutations import judged_line
from tests.support.runs import evenkeel

COUNT = 1000
IN_MAKE_TEST = 30
_LEFT_OUT = (
    ("role",),  # a role waits for its run to begin
    ("doctor",),  # with --via it runs what it is told
    ("verify", "parity"), ("verify", "layouts"), ("mismatch",),  # they may start engines and ranks
)  # fmt: skip
_NEED_A_BAD_PATH = ("train", "sft", "convert", "quant-map", "launch")
_TEXTS = (
    "", " ", "-", "--", "-1", "0", "9" * 5000, "1e400", "nan", "inf", "-inf", "0x1f", "1.5", "a" * 5000, "a\nb",
    "\x1b[2J",
    "ü 🦆", "\udcff\udcfe", "../../..", "/", "/dev/null", "/dev/zero", "/proc/self/mem", "--help", "--nosuch",
    "{host}", "%s",
    "demo", "TP2", "TP0", "XP9", "TP2,,PP", "a,b", "a=b", "=", "run.steps=", "run.steps=0", "true", "null",
    "\u202e", "[]",
)  # fmt: skip


def prepare() -> None:
    """Imports what the tries need."""
    evenkeel("recipe", "demo")
    _commands()


@cache
def _commands() -> list[tuple[tuple[str, ...], list[Any]]]:
    """(words, parameters) of every command that is tried."""
    found: list[tuple[tuple[str, ...], list[Any]]] = []
    waiting: list[tuple[tuple[str, ...], Any]] = [((), typer.main.get_command(app))]
    while waiting:
        words, command = waiting.pop()
        if any(words[: len(left)] == left for left in _LEFT_OUT):
            continue
        if hasattr(command, "commands"):
            waiting += [((*words, name), sub) for name, sub in sorted(command.commands.items())]
        else:
            found.append((words, [parameter for parameter in command.params if parameter.name != "help"]))
    return sorted(found, key=lambda one: one[0])


def attempt(seed: int, folder: Path) -> str:
    """Run one command line."""
    rng = random.Random(f"command lines/{seed}")
    words, parameters = rng.choice(_commands())
    arguments = [*words, *_arguments(rng, words, parameters, _paths(rng, folder))]
    done = evenkeel(*arguments)
    told = f"{[argument[:60] for argument in arguments]!a}"
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("warning: ", "note: "))]
    if done.returncode not in (0, 1, 2) or "Traceback" in done.stderr:
        return f"{told}: status {done.returncode}: {done.stderr[:300]!a}"
    if not lines or (done.returncode == 2 and "Usage" in done.stderr):
        return "ok"
    if len(lines) > 1 or not lines[0].startswith("error: "):
        return f"{told}: not one line: {done.stderr[:300]!a}"
    verdict = judged_line(lines[0])
    return verdict if verdict == "ok" else f"{told}: {verdict}"


def _paths(rng: random.Random, folder: Path) -> list[str]:
    """Paths that lead nowhere good; made in the empty folder."""
    (folder / "empty").mkdir()
    (folder / "file").write_bytes(rng.choice((b"", b"x", b"\0" * 100, b"\xff\xfe", b"{}", b"[1]", rng.randbytes(300))))
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "gone").symlink_to(folder / "nowhere")
    (folder / "a\nb.yaml").write_text("run: 3\n")
    (folder / "file.yaml").write_bytes(
        rng.choice((b"", b"run: [", b"extends: file.yaml", b"\xff", b"- 1", b"run: {name: a}"))
    )
    run = folder / "run"
    run.mkdir()
    (run / "recipe.yaml").write_bytes(rng.choice((b"", b"run: [", b"\0", b"run: {name: a, steps: 4}")))
    if rng.random() < 0.5:
        (run / "FORMAT").write_text(rng.choice(("", "x", "9" * 5000, "3\n", "99\n", "\0")))
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_bytes(rng.choice((b"", b"{}", b"[]", b"{", b"\xff", b'{"architectures": 3}')))
    shutil.copy(model / "config.json", model / "model.safetensors")
    names = (
        "empty",
        "file",
        "circle",
        "gone",
        "a\nb.yaml",
        "file.yaml",
        "run",
        "model",
        "nowhere",
        "file/below",
        "x" * 300,
    )
    return [str(folder / name) for name in names]


def _arguments(rng: random.Random, words: tuple[str, ...], parameters: list[Any], paths: list[str]) -> list[str]:
    given: list[str] = []
    for parameter in rng.sample(parameters, len(parameters)):
        option = parameter.param_type_name == "option"
        if option and rng.random() > (0.9 if parameter.required else 0.25):
            continue
        if option and parameter.is_flag:
            given.append(max(parameter.opts, key=len))
            continue
        value = _value(rng, parameter, paths, bad=not option and words[0] in _NEED_A_BAD_PATH)
        if option:
            given += [max(parameter.opts, key=len), value]
        elif rng.random() < 0.95:
            given += [value] * (1 if parameter.nargs == 1 else rng.randint(1, 2))
    if rng.random() < 0.1:
        given.insert(rng.randint(0, len(given)), rng.choice(_TEXTS))
    return [text.replace("\0", "") for text in given]


def _value(rng: random.Random, parameter: Any, paths: list[str], *, bad: bool) -> str:
    """`bad`: what comes first is what the command works on, and must be none."""
    if parameter.name == "out" or "plot" in parameter.name:
        return rng.choice((paths[1] + "/below", paths[2] + "/x", "/proc/nowhere/x", "/dev/null/x", paths[-1]))
    kind = _kind(parameter)
    if bad:
        return rng.choice(paths)
    if "int" in kind or "float" in kind:
        return rng.choice(("0", "1", "2", "-1", "3", "1000000", "9" * 30, "1e300", "nan", "inf", rng.choice(_TEXTS)))
    if "path" in kind or rng.random() < 0.3:
        return rng.choice((*paths, rng.choice(_TEXTS)))
    return rng.choice(_TEXTS)


def _kind(parameter: Any) -> str:
    """The type of its values, in words. typer brings its own click, or uses the one that is installed."""
    return str(getattr(parameter, "bare_type", None) or parameter.type).lower()
