"""What seeds have found, as small plans: each of them failed before it was mended."""

from __future__ import annotations

import pytest

from tests.chaos.simulation.plan import Fault, Plan, plan_of
from tests.chaos.simulation.simulate import simulate


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_batch_is_durable_before_it_is_trained_on(kind: str) -> None:
    """The collector freezes between the link and the fsync of the folder; the learner trains and publishes; the power
    fails. The batch was gone then, the version that had learned from it was published, and nobody could go on."""
    for count in (40, 46, 52):
        faults = (
            Fault(kind="freeze", role="collector", operation="unlink", count=3, seconds=60.0, replaced=False),
            Fault(kind="power cut", role="learner", operation="fsync", count=count),
        )
        plan = Plan(seed=5, kind=kind, steps=4, journaled=False, faults=faults)  # type: ignore[arg-type]
        result = simulate(plan)
        assert [problem for problem in result.problems if "metrics" not in problem] == []
        assert result.happened == ("freeze", "power cut")


def test_engines_come_back_though_a_resync_has_not_seen_a_publish() -> None:
    """Its host's listing of updates was cached: it took the number after the publish, and remembered the version
    before. From then on every resync thought that a later version had been given, and when all engines had died, none
    came back for ever."""
    assert simulate(plan_of(4026)).problems == ()


def test_a_version_that_only_a_cached_listing_names_was_published_all_the_same() -> None:
    """Its announcement was pruned meanwhile; the collector asked for it again and again, until its stack was full."""
    assert not [problem for problem in simulate(plan_of(5007)).problems if "Recursion" in problem]
