"""What is said of a command line that cannot be read: in one line, with the words that were meant.

Other trainers take keys of the configuration as `key=value` (Hydra) or as `--key value` (argparse); here they stand
behind `--set`.
"""

from __future__ import annotations

import re
from traceback import walk_tb
from typing import Any

from precision.text import one_line

_KEY_AND_VALUE = re.compile(r"\((\w[\w.]*=[^\s)]*)")


def usage_line(error: Any) -> str:
    """Of a click exception, without `error:` in front."""
    context = _context(error)
    command = "evenkeel" if context is None else context.command_path
    message = one_line(error.format_message(), 400).rstrip(".")
    return f"{message}; {_meant(error, message, context)}`{command} --help` says what it takes"


def _context(error: Any) -> Any:
    """Which command was read; errors of click's parser do not say, but the frames that they came through do."""
    found = getattr(error, "ctx", None)
    if found is None:
        seen = [frame.f_locals.get("ctx") for frame, _ in walk_tb(error.__traceback__)]
        found = next((one for one in reversed(seen) if hasattr(one, "command_path")), None)
    return found


def _meant(error: Any, message: str, context: Any) -> str:
    """`a recipe's key needs --set before it: --set run.steps=3; `, or nothing."""
    if not _takes_keys(context):
        return ""
    if "extra argument" in message and (given := _KEY_AND_VALUE.search(message)):
        return f"a recipe's key needs --set before it: --set {given[1]}; "
    if "No such option" in message and (keys := _keys_of(str(getattr(error, "option_name", "")))):
        return f"a recipe's key is given by --set: {keys}; "
    return ""


def _takes_keys(context: Any) -> bool:
    return context is not None and any("--set" in one.opts for one in context.command.params)


def _keys_of(option: str) -> str:
    """`--set learner.optimizer.lr=VALUE`, of an option that names a key of the recipe, here or in another trainer."""
    from pipeline.config.meant_keys import known_keys, meant_by

    told = meant_by(option.lstrip("-").replace("-", "_"))
    words = re.split(r"[\s?`]+", told) if told.startswith(("did you mean", "here it is")) else []
    return " or ".join(f"--set {key}=VALUE" for key in words if key in known_keys())
