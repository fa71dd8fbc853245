"""Packages that only some commands need, and the extra of pyproject.toml that names each."""

from __future__ import annotations

from importlib.util import find_spec

from pipeline.requirements import pip_install

EXTRA_OF = {
    "einops": "learner",
    "mbridge": "learner",
    "megatron": "learner",
    "torch": "learner",
    "transformers": "learner",
    "math_verify": "rollout",
    "sglang": "rollout",
    "sglang_router": "rollout",
    "modelopt": "convert",
    "transformer_engine": "learner-gpu",
    "tensorboard": "export",
    "wandb": "export",
    "mlflow": "mlflow",
    "sqlalchemy": "mlflow",
    "trackio": "trackio",
}
"""What a machine that only plans and reads runs need not have."""
LEARNER = tuple(package for package, extra in EXTRA_OF.items() if extra == "learner")
_MLFLOW = ("mlflow-skinny", "sqlalchemy", "alembic", "cryptography")
DISTRIBUTIONS = {
    "megatron": ("megatron-core",),
    "math_verify": ("math-verify",),
    "sglang_router": ("sglang-router",),
    "modelopt": ("nvidia-modelopt",),
    "transformer_engine": ("transformer-engine",),
    "mlflow": _MLFLOW,
    "sqlalchemy": _MLFLOW,
}
"""What to install for a package where that has another name, or is not all."""


REBUILD = "in the source folder `make clean install` builds the environment anew; elsewhere install the package again"


def absent(packages: tuple[str, ...]) -> list[str]:
    """Those that are not installed. Nothing is imported."""
    return [package for package in packages if find_spec(package) is None]


def how_to_install(*packages: str) -> str:
    """`pip install 'torch>=2.11'`, and what a CPU takes instead."""
    by_make = {EXTRA_OF[package] for package in packages} & {"learner", "rollout"}
    on_cpu = " (on a CPU: `make install` in the source folder)" if by_make else ""
    return pip_install(*(name for package in packages for name in DISTRIBUTIONS.get(package, (package,)))) + on_cpu
