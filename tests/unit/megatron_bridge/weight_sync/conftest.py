"""Engines that the tests of the transports publish to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.doubles.receiving_double import ReceivingDouble


@pytest.fixture
def engines() -> Iterator[list[ReceivingDouble]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ReceivingDouble()) for _ in range(2)]
