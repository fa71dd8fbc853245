"""What publishes, and engines that the tests of the transports publish to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pipeline.config.recipe import LearnerSection
from precision.objectives.p3o import P3O
from tests.doubles.receiving_double import ReceivingDouble
from tests.support.learners import learner_here
from tests.support.runs import make_model


@pytest.fixture
def engines() -> Iterator[list[ReceivingDouble]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ReceivingDouble()) for _ in range(2)]


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A small dense learner in bfloat16, which the tests of a file may train or scale."""
    folder = make_model(tmp_path_factory.mktemp("published") / "model")
    section = LearnerSection(precision="bf16", micro_batch_tokens=256)
    with learner_here(folder, section, P3O(), temperature=1.0, seed=0, total_steps=10) as learner:
        yield learner
