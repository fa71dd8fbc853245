"""The run's own package reads a run directory anywhere: it needs no learner's and no engine's stack."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = (
    "advantages",
    "audit",
    "batch_format",
    "character_tokenizer",
    "evaluation",
    "journal",
    "rewards",
    "store",
    "tasks",
    "tokenizer",
    "trajectories",
    "verifiers",
)


@pytest.mark.parametrize("module", MODULES)
def test_no_heavy_stack_is_loaded(module: str) -> None:
    program = (
        f"import sys, pipeline.{module}\n"
        "heavy = {'torch', 'transformers', 'megatron', 'sglang', 'math_verify', 'sympy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
