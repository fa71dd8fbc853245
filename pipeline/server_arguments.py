"""What a recipe passes to SGLang's servers as it is (extra_args): the values in it, and how many GPUs it multiplies."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.errors import RecipeError

DATA_PARALLEL = ("--dp", "--dp-size", "--data-parallel-size")
PIPELINE_PARALLEL = ("--pp", "--pp-size", "--pipeline-parallel-size")
"""Names of the arguments by which a server takes several times its tensor parallel GPUs."""
OWN_PLACES = ("--base-gpu-id", "--gpu-id-step")
"""Names of those that say on which GPUs a server runs. They are the same for all engines of a recipe."""


def gpus_of_server(tensor_parallel: int, extra_args: Sequence[str]) -> int:
    """Of all its replicas and pipeline stages."""
    within = "--enable-dp-attention" in extra_args  # then data parallel ranks are the tensor parallel ones
    multipliers = (PIPELINE_PARALLEL,) if within else (PIPELINE_PARALLEL, DATA_PARALLEL)
    copies = [next((found for name in names if (found := option(extra_args, name))), "1") for names in multipliers]
    return tensor_parallel * math.prod(int(copy) if copy.isdecimal() else 1 for copy in copies)


def option(extra_args: Sequence[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value`; the last one wins, as with argparse. RecipeError without one."""
    found: str | None = None
    for place, argument in enumerate(extra_args):
        if argument.startswith(f"{name}="):
            found = argument.partition("=")[2]
        elif argument == name:
            if place + 1 == len(extra_args):
                raise RecipeError(f"extra_args ends with {name}, which needs a value; add it")
            found = extra_args[place + 1]
    return found
