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


@pytest.mark.parametrize("seed", [4380, 4710])
def test_a_batch_that_asked_many_prompts_that_do_not_fit_may_lack_groups(seed: int) -> None:
    """All problems were solved but one that nobody solves and one that does not fit, which took three of the four
    groups that the batch could ask. The judge expected two groups all the same."""
    assert simulate(plan_of(seed)).problems == ()


@pytest.mark.parametrize("seed", [16, 22])
def test_what_a_finished_learner_removed_does_not_come_back(seed: int) -> None:
    """It had removed its last old checkpoint, and said that nothing was left to do; the power failed. Nobody started it
    again, so what came back of the checkpoint stayed for ever."""
    cut = Fault(kind="power cut", role="collector", operation="rename", count=6)
    result = simulate(Plan(seed=seed, steps=4, keep_checkpoints=1, journaled=False, faults=(cut,)))
    assert result.happened == ("power cut",)
    assert result.problems == ()


def test_a_start_whose_files_a_later_one_removed_says_that_it_was_superseded() -> None:
    """The first start of the learner froze, and claimed its epoch after the second one. It removed the folder that the
    second was writing version 0 to. That one died of a missing file; started again, it would take over in turn."""
    freeze = Fault(kind="freeze", role="learner", operation="fsync", count=8, seconds=1.4763629905078215)
    result = simulate(Plan(seed=2441, preemption=0.1, faults=(freeze,)))
    assert result.happened == ("freeze",)
    assert result.problems == ()


def test_no_host_remembers_what_it_saw_before_the_power_failed() -> None:
    """The simulation's hosts did: a learner listed announcements as they had been, took a version that the cut had
    taken back for published, and finished; the collector waited for it for ever."""
    assert simulate(plan_of(6588)).problems == ()


def test_metrics_stay_though_who_made_their_folder_was_killed_before_it_was_durable() -> None:
    """The next start found the folder there, and made durable only what it wrote within; a power cut took it all."""
    kill = Fault(kind="kill", role="learner", operation="fsync", count=41)
    cut = Fault(kind="power cut", role="learner", operation="update", count=4)
    result = simulate(Plan(seed=1, steps=4, journaled=False, faults=(kill, cut)))
    assert result.happened == ("kill", "power cut")
    assert result.problems == ()


def test_a_learner_finds_the_newest_checkpoint_though_its_host_remembers_an_older_listing() -> None:
    """Another host had saved step 4 a second before. The learner went on from step 3, and trained one step twice."""
    assert simulate(plan_of(900340)).problems == ()
