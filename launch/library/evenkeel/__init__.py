"""Even Keel from Python: `import evenkeel`.

    run = evenkeel.train("demo", {"run.name": "mine"})    # or evenkeel.Run("runs/mine"), also while it is trained
    run.metrics["reward_mean"], run.batch(3).reward   # arrays
    pandas.DataFrame(run.metrics)                     # a dict of columns is what data frames are made of

Importing it loads neither torch nor an engine. What is wrong raises an EvenKeelError, whose text is what the command
line would say.

A function of a notebook or a script is written to a module: rewards run in processes of their own.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.analysis import summary as summaries
from pipeline.analysis.run_log import RunLog, numbers, recipes_of
from pipeline.analysis.samples import Background, sample_rows, tokenizer_of
from pipeline.child_process import append_working_folder_to_path
from pipeline.config import loader
from pipeline.config.recipe import Recipe
from pipeline.data.batch import Batch
from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.files import write_atomically
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import EvenKeelError, RecipeError
from precision.text import one_line, quoted

__all__ = ["Batch", "EvenKeelError", "Recipe", "Run", "list_runs", "load_recipe", "new_model", "sft", "train"]

_HEAD = '''"""Written by `import evenkeel` from a function of a notebook or a script."""

from __future__ import annotations
'''
RecipeLike = str | Path | Mapping[str, Any] | Recipe
"""A YAML file, the name of a recipe that comes with Even Keel, a mapping of what a file would hold, or a recipe."""
Changes = Mapping[str, Any] | Sequence[str]
"""{"learner.optimizer.lr": 1e-4}, or ["learner.optimizer.lr=1e-4"] as after --set of the command line."""


@dataclass(frozen=True)
class Run:
    """A run directory, such as runs/demo. Raises StoreError where it is none, and for a file that is damaged."""

    path: Path
    _directory: RunDirectory = field(init=False, repr=False, compare=False)

    def __init__(self, path: str | Path) -> None:
        object.__setattr__(self, "path", Path(path))
        object.__setattr__(self, "_directory", RunDirectory(self.path))
        recipes_of(self.path)

    @property
    def recipe(self) -> Recipe:
        """The recipe that it goes by now, every default spelled out."""
        return self._directory.recipe()

    @property
    def summary(self) -> dict[str, Any]:
        """Its headline numbers, as `evenkeel runs show --json` prints them."""
        return summaries.summary(self.path)

    @property
    def metrics(self) -> dict[str, NDArray[Any]]:
        """Name → [steps], a row a step; the names are those of docs/metrics.md, parts behind a slash: `seconds/update`.
        `step` is int64, all else float64, NaN where a step has no such number."""
        return _columns(read_metrics(self.path), "step")

    @property
    def evaluations(self) -> dict[str, NDArray[Any]]:
        """Name → [evaluated versions], such as `pass_at_1` and `pass_at_k/8`; `version` is int64."""
        return _columns(RunLog.read(self.path).evaluations, "version")

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened, by time; docs/file-formats.md has the kinds."""
        return read_events(self.path)

    @property
    def batches(self) -> list[int]:
        """The numbers of the batches that are there, ascending."""
        return BatchStore(self._directory.batches).committed()

    def batch(self, index: int) -> Batch:
        """One batch, verified: flat arrays with offsets. Raises CorruptBatchError, StoreError (it is not there)."""
        return BatchStore(self._directory.batches).read(index, None)

    def learner_logprobs(self, index: int) -> NDArray[np.float32] | None:
        """The learner's log-probabilities of a batch, from before it trained on it: [responses], beside
        `batch(index).rollout_logprobs`. None when it was not trained yet, or run.keep_logprobs has
        removed them."""
        return self._directory.learner_logprobs(index)

    def samples(self, index: int) -> list[dict[str, Any]]:
        """A mapping a sample: prompt, response and reference answer as text, the data's metadata, reward and its parts,
        advantage, versions, log-ratios."""
        batch = self.batch(index)
        tokenizer = tokenizer_of(self._directory, self.recipe.model.path, batch.contract.tokenizer_sha256)
        return list(sample_rows(batch, tokenizer, Background(self.path), learner_logprobs=self.learner_logprobs(index)))


def list_runs(folder: str | Path = "runs") -> list[Run]:
    """The runs of a folder that can be read, by name. Raises StoreError when it is no folder."""
    return [Run(found["path"]) for found in summaries.list_runs(Path(folder)) if "error" not in found]


def _columns(lines: Sequence[Mapping[str, Any]], key: str) -> dict[str, NDArray[Any]]:
    """Return name → [lines] float64, NaN where a line has no such number; `key`, which each line has, is the first
    column, int64."""
    rows = [dict(numbers(line)) for line in lines]
    names = dict.fromkeys(name for row in rows for name in row if name != key)
    first = {key: np.array([line[key] for line in lines], np.int64)}
    return first | {name: np.array([row.get(name, np.nan) for row in rows], np.float64) for name in names}


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
            f"recipe is {quoted(recipe)}, expected a recipe's path or name, a mapping, or a recipe from load_recipe"
        )
    if isinstance(changes, str) or not isinstance(changes, Mapping | Sequence):
        raise RecipeError(f'changes are {quoted(changes)}, expected {{"run.steps": 3}} or ["run.steps=3"]')
    if isinstance(recipe, Recipe):
        recipe = recipe.model_dump(mode="json")
    sections, dotted = dict[str, Any](), dict[str, Any]()
    if isinstance(recipe, Mapping):
        for key, value in _plain(recipe).items():
            (sections if "." not in key else dotted)[key] = value
    given = _plain(changes).items() if isinstance(changes, Mapping) else [str(change) for change in changes]
    overrides = [one if isinstance(one, str) else loader.override_of(*one) for one in (*dotted.items(), *given)]
    return sections if isinstance(recipe, Mapping) else Path(recipe), overrides


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return data as JSON would have it: a path is text, a function its name, a number of numpy a number. Raises
    RecipeError."""

    def plain(value: Any) -> Any:
        if callable(value):
            return name_of_function(value)
        if isinstance(value, Mapping):
            return dict(value)
        return value.tolist() if hasattr(value, "tolist") else str(value)

    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(data), default=plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"{quoted(data)} is not plain data: {error}") from error
    return found


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
        if getattr(thing, "__closure__", None):
            raise RecipeError(f"{thing.__name__} takes variables of the function around it; define it at the top")
        try:
            text = textwrap.dedent(inspect.getsource(thing)).rstrip()
        except (OSError, TypeError) as error:
            raise RecipeError(
                f"the text of {thing.__name__} is not known ({one_line(error, 100)}); write it in a file, for example "
                f'my_rewards.py, and give "my_rewards:{thing.__name__}"'
            ) from error
        parts[name] = ""  # it may name itself
        known = vars(sys.modules["__main__"]) if isinstance(thing, type) else thing.__globals__
        for used in dict.fromkeys(_loaded(compile(_HEAD + text, "<function>", "exec"))):
            if used in known and known[used] is not getattr(builtins, used, None):
                _collect(known[used], used, parts)
        del parts[name]
        parts[name] = text
    else:
        same = False
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            same = bool(ast.literal_eval(repr(thing)) == thing)
        if not same:
            raise RecipeError(
                f"the function uses {name}, a {type(thing).__name__}, which no file can say; make it inside the "
                "function, or write both in a file of your own and give its name, package.module:function"
            )
        parts[name] = f"{name} = {thing!r}"


def _loaded(code: CodeType) -> Iterator[str]:
    """Yield the global names that a definition reads when it is made and when it is called."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loaded(constant)
