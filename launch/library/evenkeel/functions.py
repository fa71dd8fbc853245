"""Write a function that was defined in a notebook or a script to a module: rewards run in processes of their own."""

from __future__ import annotations

import ast
import builtins
import dis
import hashlib
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from pipeline.data.files import write_atomically
from pipeline.errors import RecipeError
from precision.text import one_line

_HEAD = '''"""Written by `import evenkeel` from a function of a notebook or a script."""

from __future__ import annotations
'''


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
