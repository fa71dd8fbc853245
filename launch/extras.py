"""Packages that only some commands need, and the extra of `evenkeel` that installs each."""

from __future__ import annotations

from importlib.util import find_spec

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


def absent(packages: tuple[str, ...]) -> list[str]:
    """Those that are not installed. Nothing is imported."""
    return [package for package in packages if find_spec(package) is None]


def how_to_install(package: str) -> str:
    """`pip install evenkeel[learner]`, and what a CPU takes instead."""
    extra = EXTRA_OF[package]
    on_cpu = " (on a CPU: evenkeel[cpu])" if extra in ("learner", "rollout") else ""
    return f"pip install evenkeel[{extra}]{on_cpu}"
