"""Engines of the session, and quiet imports: third-party warnings are not ours, everything of ours stays an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron_bridge.learner  # noqa: F401 (imported here so that its dependencies' warnings are not ours)
    from tests.support.engines import TinyEngines


@pytest.fixture(scope="session")
def tiny_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyEngines]:
    """One engine for each precision, for all files that lease them; see tests.support.balance."""
    engines = TinyEngines(tmp_path_factory.mktemp("tiny-engines"))
    yield engines
    engines.close()
