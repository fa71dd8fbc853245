"""Train, fine-tune and make recipes from Python.

A function that was defined in a notebook or a script is written to a module: rewards run in processes of their own.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import dis
import hashlib
import importlib
import inspect
import json
import re
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from evenkeel.runs import Run
from pipeline.child_process import append_working_folder_to_path
from pipeline.config import loader
from pipeline.config.recipe import Recipe
from pipeline.data.files import write_atomically
from pipeline.errors import RecipeError
from precision.text import one_line, quoted

_HEAD = '''"""Written by `import evenkeel` from a function of a notebook or a script."""

from __future__ import annotations
'''
RecipeLike = str | Path | Mapping[str, Any] | Recipe
"""A YAML file, the name of a recipe that comes with Even Keel, a mapping of what a file would hold, or a recipe."""
Changes = Mapping[str, Any] | Sequence[str]
"""{"learner.optimizer.lr": 1e-4}, or ["learner.optimizer.lr=1e-4"] as after --set of the command line."""


def load_recipe(recipe: RecipeLike, changes: Changes = ()) -> Recipe:
    """The recipe of a YAML file, or the one of that name that comes with Even Keel, or of a mapping such as
    {"extends": "demo", "run": {"name": "mine"}}, with `changes` of its keys. Raises RecipeError.

    Functions, such as a reward, may be given by name, `package.module:function`, or as they are. Modules are looked for
    in the working folder as well.
    """
    append_working_folder_to_path()
    return loader.load_recipe(*_readable(recipe, changes))


def train(recipe: RecipeLike, changes: Changes = (), *, metrics_port: int | None = None) -> Run:
    """Train as `evenkeel train` does: engines, collector and learner are processes of their own on this machine.

    Returns the run once it is finished, or once it was asked to end by Ctrl-C; the same call then goes on. Progress is
    on stderr. Call it in the main thread. Raises EvenKeelError when the run cannot be begun or finished.
    """
    from launch.run.train import train_run

    resolved = load_recipe(recipe, changes)
    with _alone("train"):
        train_run(resolved, metrics_port)
    return Run(resolved.directory)


def sft(
    recipe: RecipeLike,
    out: str | Path,
    changes: Changes = (),
    *,
    steps: int = 220,
    batch_size: int = 128,
    lr: float | None = None,
    warmup_steps: int | None = None,
    data: str | Path | None = None,
    held_out: float | str | Path | None = None,
) -> Run:
    """Fine-tune as `evenkeel sft` does, on demonstrations of the task or on the rows of `data`, and write the model to
    the folder `out`.

    Returns the run, whose metrics are the losses; the same call resumes one that was interrupted. Call it in the main
    thread. Raises EvenKeelError.
    """
    from launch.run.sft import read_recipe, run_sft

    append_working_folder_to_path()
    rows = None if data is None else Path(data)
    resolved = read_recipe(*_readable(recipe, changes), steps, rows)
    with _alone("sft"):
        run_sft(
            resolved,
            Path(out),
            steps=steps,
            batch_size=batch_size,
            lr=lr,
            warmup_steps=warmup_steps,
            data=rows,
            held_out=None if held_out is None else str(held_out),
        )
    return Run(resolved.directory.with_name(f"{resolved.run.name}-sft"))


def new_model(folder: str | Path, *, config: str | Path | None = None, **sizes: Any) -> Path:
    """A random Qwen3 with a character tokenizer, as `evenkeel model new`: layers=2, hidden=128, seed=0 …; with
    `config`, of the sizes of the config.json in that folder. Needs torch. Raises ModelError."""
    from launch.convert.new_model import new_model as make
    from launch.convert.new_model import new_model_like as make_like

    if config is None:
        make(Path(folder), **sizes)
    else:
        make_like(Path(folder), Path(config), **sizes)
    return Path(folder)


def _readable(recipe: RecipeLike, changes: Changes) -> tuple[Path | dict[str, Any], list[str]]:
    """What the loader takes. Keys with a dot at the top of a mapping, such as "run.name", are changes of it."""
    if not isinstance(recipe, str | Path | Mapping | Recipe):
        raise RecipeError(
            f"recipe is {quoted(recipe)}, expected the path or the name of one, a mapping or what load_recipe returned"
        )
    if isinstance(changes, str) or not isinstance(changes, Mapping | Sequence):
        raise RecipeError(f'changes are {quoted(changes)}, expected {{"run.steps": 3}} or ["run.steps=3"]')
    if isinstance(recipe, Recipe):
        recipe = recipe.model_dump(mode="json")
    overrides = _overrides(changes) if isinstance(changes, Mapping) else [str(change) for change in changes]
    if isinstance(recipe, Mapping):
        plain = _plain(recipe)
        sections = {key: value for key, value in plain.items() if "." not in key}
        return sections, _overrides({key: plain[key] for key in plain.keys() - sections.keys()}) + overrides
    return Path(recipe), overrides


def _overrides(changes: Mapping[str, Any]) -> list[str]:
    return [loader.override_of(key, value) for key, value in _plain(changes).items()]


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON would have it: a path is text, a function its name, a number of numpy a number. Raises RecipeError."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(data), default=_to_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"{quoted(data)} is not plain data: {error}") from error
    return found


def _to_plain(value: Any) -> Any:
    if callable(value):
        return name_of_function(value)
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


@contextmanager
def _alone(what: str) -> Iterator[None]:
    """Train in a cell of a notebook as in a program: the kernel's event loop stands still meanwhile, and other loops
    run. Raises RecipeError in another thread than the main one, which alone hears of Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        raise RecipeError(f"evenkeel.{what} is called in thread {threading.current_thread().name}; call it in the main")
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        if running is not None:
            asyncio.set_event_loop(running)
        asyncio._set_running_loop(running)


def name_of_function(thing: Any) -> str:
    """Return `module:name`, by which a recipe names a function or a class.

    A function of `__main__` is written to a module in the working folder, with what it uses: imports, other functions,
    plain values and patterns. The module's name ends in a digest of its text, so that a run never sees a later version.
    Raises RecipeError for what no module can hold.
    """
    thing = inspect.unwrap(thing)
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(thing, FunctionType | type) or not isinstance(module, str) or not str(name).isidentifier():
        raise RecipeError(
            f"{one_line(repr(thing), 100)} has no name at the top of a module; write a function there with def"
        )
    if module != "__main__":
        return f"{module}:{name}"
    parts: dict[str, str] = {}
    _collect(thing, str(name), parts)
    imports = sorted(text for text in parts.values() if text.startswith(("import ", "from ")))
    others = [text for text in parts.values() if not text.startswith(("import ", "from "))]
    text = _HEAD + "\n" + "\n".join(dict.fromkeys(imports)) + "\n\n\n" + "\n\n\n".join(others) + "\n"
    written = f"evenkeel_{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    try:
        write_atomically(Path(f"{written}.py"), text)
    except OSError as error:
        raise RecipeError(f"{name} cannot be written to {Path.cwd()}: {error.strerror}; work elsewhere") from error
    importlib.invalidate_caches()
    return f"{written}:{name}"


def _collect(thing: Any, name: str, parts: dict[str, str]) -> None:
    """Add the text that defines `name` to `parts`, behind the text of all that it uses."""
    if name in parts:
        return
    if isinstance(thing, ModuleType):
        parts[name] = f"import {thing.__name__}" + ("" if thing.__name__ == name else f" as {name}")
    elif isinstance(thing, re.Pattern):
        parts[f"{name}.re"] = "import re"
        parts[name] = f"{name} = re.compile({thing.pattern!r}, {int(thing.flags)})"
    elif getattr(thing, "__module__", "__main__") != "__main__" and hasattr(thing, "__qualname__"):
        own = thing.__qualname__
        parts[name] = f"from {thing.__module__} import {own}" + ("" if own == name else f" as {name}")
    elif isinstance(thing := inspect.unwrap(thing), FunctionType | type):
        parts[name] = ""  # it may name itself
        text = _source(thing)
        for used, value in _used(text, thing):
            _collect(value, used, parts)
        del parts[name]
        parts[name] = text
    else:
        parts[name] = f"{name} = {_literal(name, thing)}"


def _source(thing: Any) -> str:
    if getattr(thing, "__closure__", None):
        raise RecipeError(f"{thing.__name__} takes variables of the function around it; define it at the top")
    try:
        return textwrap.dedent(inspect.getsource(thing)).rstrip()
    except (OSError, TypeError) as error:
        raise RecipeError(
            f"the text of {thing.__name__} is not known ({one_line(error, 100)}); write it in a file, for example "
            f'my_rewards.py, and give "my_rewards:{thing.__name__}"'
        ) from error


def _used(text: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """The global names that a definition reads when it is made and when it is called, with their values."""
    known = vars(sys.modules["__main__"]) if isinstance(thing, type) else thing.__globals__
    for used in dict.fromkeys(_loaded(compile(_HEAD + text, "<function>", "exec"))):
        if used in known and known[used] is not getattr(builtins, used, None):
            yield used, known[used]


def _loaded(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loaded(constant)


def _literal(name: str, value: Any) -> str:
    text = repr(value)
    try:
        if ast.literal_eval(text) == value:
            return text
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        pass
    raise RecipeError(
        f"the function uses {name}, a {type(value).__name__}, which no file can say; make it inside the function, or "
        "write both in a file of your own and give its name, package.module:function"
    )
