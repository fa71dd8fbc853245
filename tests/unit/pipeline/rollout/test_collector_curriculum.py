"""Which prompts are asked: dynamic sampling and solved problems, with several batches under way and with kills."""

from __future__ import annotations

import random
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.analysis.audit import verify_history
from pipeline.data.batch import Batch, Completion, LogprobContract
from pipeline.data.event_log import read_events
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import FatalError
from pipeline.rewards.pool import Verdict, Verifiers
from pipeline.rollout.batch_builder import SolvedPromptRule, num_repeated
from pipeline.rollout.collector import Collector
from pipeline.schedule import Schedule
from pipeline.trainer.batches import asked_solve_rate, describe
from pipeline.trainer.retention import Retention
from precision.mismatch.alarms import alarms
from tests.support.collecting import GROUP, PROMPTS, PretendEngines, batches, build, collect, engines_of

SYNC = Schedule(kind="sync", steps=4)
SCHEDULES = [
    replace(SYNC, steps=6),
    Schedule(kind="async", steps=8, lag=2),
    Schedule(kind="staged", steps=8, updates_per_stage=4),
]
RETIREMENT = SolvedPromptRule(pass_rate=0.9, min_samples=GROUP)


def tells_apart(digits: str, member: int) -> bool:
    """One of the two samples is right where the last digit is below 4; above, both or none are."""
    last = int(digits[-1])
    return member == 0 if last < 4 else last < 7


def is_informative(digits: str) -> bool:
    return int(digits[-1]) < 4


def test_refills_until_every_group_tells_samples_apart(run: RunDirectory, verifiers: Verifiers) -> None:
    collector = build(run, verifiers, SYNC, max_refills=20)
    engines_of(collector).solves = tells_apart
    found = batches(collect(collector))
    for batch in found:
        assert sorted(batch.reward.tolist()) == [0.0] * PROMPTS + [1.0] * PROMPTS
        assert batch.open_groups == ()
        groups = batch.group[::GROUP].tolist()
        assert groups == sorted(groups)
        asked = {group: collector.prompts.prompt(group).text.removesuffix("=") for group in range(batch.next_group)}
        assert all(is_informative(asked[group]) for group in groups)
        for drop in batch.dropped:
            solved = tells_apart(asked[drop.group], 0)
            assert not is_informative(asked[drop.group])
            assert drop.reason == f"zero variance: all rewards {float(solved):g}"
            assert (drop.kind, drop.samples, drop.solved) == ("zero_variance", GROUP, GROUP * solved)
            assert drop.problem == collector.prompts.problem(drop.group)
    dropped = sum(len(batch.dropped) for batch in found)
    assert found[-1].next_group == SYNC.steps * PROMPTS + dropped > SYNC.steps * PROMPTS
    assert verify_history(run.path, SYNC, SYNC.steps).sound
    for event, batch in zip(read_events(run.path, "committed"), found, strict=True):
        assert (event["informative"], event["dropped"], event["interrupted"]) == (PROMPTS, 0, 0)
        assert event["refills"] == event["zero_variance"] == event["zero_variance_dropped"] == len(batch.dropped)


def test_refills_are_bounded_and_then_the_batch_is_filled_up(run: RunDirectory, verifiers: Verifiers) -> None:
    """Nothing is informative: 3 × (1 + 2) groups are asked, the first 3 kept, 6 dropped."""
    schedule = Schedule(kind="sync", steps=2)
    collector = build(run, verifiers, schedule, max_refills=2)
    for index, batch in enumerate(batches(collect(collector))):
        first = 9 * index
        assert batch.group.tolist() == [g for g in range(first, first + 3) for _ in range(GROUP)]
        assert [drop.group for drop in batch.dropped] == list(range(first + 3, first + 9))
        assert batch.next_group == first + 9
    events = read_events(run.path, "committed")
    assert [(e["informative"], e["refills"], e["zero_variance_dropped"], e["zero_variance"]) for e in events] == [
        (0, 6, 6, 9)
    ] * 2


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
@pytest.mark.parametrize("seed", range(3))
def test_however_often_it_is_killed_no_group_is_lost_or_asked_for_two_batches(
    run: RunDirectory, verifiers: Verifiers, schedule: Schedule, seed: int
) -> None:
    rng = random.Random(seed)
    solved_rule = SolvedPromptRule(pass_rate=0.9, min_samples=GROUP)
    for killed_after_s in [*(rng.uniform(0.05, 0.35) for _ in range(4)), None]:
        collector = build(run, verifiers, schedule, num_prompts=15, max_refills=3, solved_rule=solved_rule)
        engines = engines_of(collector)
        engines.solves = tells_apart
        engines.latency_s = lambda _digits: rng.uniform(0.0, 0.03)
        collect(collector, killed_after_s=killed_after_s)
    found = batches(collector.store)
    owners = Counter(group for b in found for group in {*b.group.tolist(), *(drop.group for drop in b.dropped)})
    assert set(owners) == set(range(found[-1].next_group))
    assert set(owners.values()) == {1}
    assert [b.num_samples for b in found] == [PROMPTS * GROUP] * schedule.steps
    audit = verify_history(run.path, schedule, schedule.steps, solved_rule)
    assert audit.sound
    assert audit.zero_variance > 0
    assert audit.solved > 0


def test_solved_problems_leave_for_good(run: RunDirectory, verifiers: Verifiers) -> None:
    """6 problems, 3 a batch: batches 0 and 1 ask each once. One that is solved in either is never asked again."""
    schedule = Schedule(kind="sync", steps=6)
    collector = build(run, verifiers, schedule, num_prompts=6, solved_rule=RETIREMENT)
    engines = engines_of(collector)
    source = collector.prompts
    solved = {source.problem(group) for group in (0, 5)}
    easy = {source.prompt(group).text.removesuffix("=") for group in (0, 5)}
    engines.solves = lambda digits, member: digits in easy or member == 0
    found = batches(collect(collector))
    assert all(engines.asked.count(digits) == 1 for digits in easy)
    assert [drop for batch in found[:2] for drop in batch.dropped] == []
    passed_over = [drop for batch in found[2:] for drop in batch.dropped]
    assert {drop.problem for drop in passed_over} == solved
    assert {drop.kind for drop in passed_over} == {"solved"}
    assert passed_over[0].reason == f"problem {passed_over[0].problem} is solved"
    assert [batch.num_samples for batch in found] == [PROMPTS * GROUP] * 6
    # Batches 2 to 5 ask 12 groups of the 4 problems that are left: 3 epochs of 6 groups, 2 of them passed over.
    assert set(range(found[-1].next_group)) == {g for b in found for g in b.group.tolist()} | {
        drop.group for b in found for drop in b.dropped
    }
    assert Counter(p for b in found[2:] for p in b.problem[::GROUP].tolist()) == dict.fromkeys({*range(6)} - solved, 3)
    audit = verify_history(run.path, schedule, 6, RETIREMENT)
    assert audit.sound
    assert audit.solved == len(passed_over)
    assert [e["solved_problems"] for e in read_events(run.path, "committed")] == [0, 1, 2, 2, 2, 2]


def test_a_restart_counts_from_the_log_and_reads_only_batches_without_a_line(
    run: RunDirectory, verifiers: Verifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5 batches the line of batch 1 is damaged, that of batch 3 cut off, and batch 4's is of another batch."""
    schedule = Schedule(kind="sync", steps=5)
    collect(build(run, verifiers, schedule, num_prompts=40, solved_rule=RETIREMENT))
    empty, *lines = run.attempts_file.read_text().split("\n")
    assert (empty, len(lines)) == ("", 5)
    lines[1] = lines[1].replace(",", ";", 1)
    lines[4] = lines[4].replace("[4,", "[3,")
    run.attempts_file.write_text("\n".join([*lines[:3], lines[4], lines[3][:-9]]))
    read = list[int]()
    original = BatchStore.read_samples
    monkeypatch.setattr(BatchStore, "read_samples", lambda store, index: read.append(index) or original(store, index))
    longer = Schedule(kind="sync", steps=10)
    collect(build(run, verifiers, longer, num_prompts=40, solved_rule=RETIREMENT))
    assert read == [1, 3, 4]
    assert verify_history(run.path, longer, 10, RETIREMENT).sound
    read.clear()
    collect(build(run, verifiers, Schedule(kind="sync", steps=11), num_prompts=40, solved_rule=RETIREMENT))
    assert read == [], "it has noted them"


def test_a_restart_does_not_read_the_checksums_of_old_batches_on_the_event_loop(
    run: RunDirectory, verifiers: Verifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = Schedule(kind="sync", steps=3)
    collect(build(run, verifiers, schedule, num_prompts=40, solved_rule=RETIREMENT))
    read, original = list[tuple[int, bool]](), BatchStore.checksum

    def checksum(store: BatchStore, index: int) -> str:
        read.append((index, threading.current_thread() is threading.main_thread()))
        return original(store, index)

    monkeypatch.setattr(BatchStore, "checksum", checksum)
    collect(build(run, verifiers, schedule, num_prompts=40, solved_rule=RETIREMENT))
    assert read == [(0, False), (1, False), (2, False)]


def test_a_restart_counts_removed_batches_by_their_records(run: RunDirectory, verifiers: Verifiers) -> None:
    """It asks what it would ask if they were there, also without its own log."""
    schedule, longer = Schedule(kind="sync", steps=4), Schedule(kind="sync", steps=8)

    def collected(run: RunDirectory, schedule: Schedule) -> list[Batch]:
        collector = build(run, verifiers, schedule, num_prompts=9, solved_rule=RETIREMENT)
        engines_of(collector).solves = lambda digits, member: int(digits[-1]) < 3 or member == 0
        return batches(collect(collector))

    collected(run, schedule)
    whole = RunDirectory(Path(shutil.copytree(run.path, run.path.with_name("whole"))))
    (run.checkpoints / "000004").mkdir(parents=True)
    (run.checkpoints / "000004" / "COMMIT").touch()
    Retention(run=run, keep_batches=1, keep_logprobs=None, solved_at=RETIREMENT.solved_at).apply()
    run.attempts_file.unlink()
    found = collected(run, longer)
    assert [batch.index for batch in found] == [3, 4, 5, 6, 7]
    expected = collected(whole, longer)[3:]
    assert [batch.group.tolist() for batch in found] == [batch.group.tolist() for batch in expected]
    audit = verify_history(run.path, longer, 8, RETIREMENT)
    assert audit.sound
    assert audit.removed == (0, 1, 2)
    assert audit.solved > 0


def test_the_verdict_rests_on_what_the_required_version_was_trained_on(run: RunDirectory, verifiers: Verifiers) -> None:
    """One problem a batch of three groups, lag 2: batch b looks at the batches below b - 2, however many are there."""
    schedule = Schedule(kind="async", steps=5, lag=2)
    collector = build(run, verifiers, schedule, num_prompts=4, solved_rule=RETIREMENT)
    engines_of(collector).solves = lambda digits, member: digits == collector.prompts.prompt(0).text[:-1] or member == 0
    found = batches(collect(collector))
    solved = collector.prompts.problem(0)  # group 0: in batch 0
    passed = [any(drop.problem == solved for drop in batch.dropped) for batch in found]
    assert passed[:3] == [False] * 3, "version 0 was trained on nothing"
    assert passed[3:] != [False] * 2
    assert verify_history(run.path, schedule, 5, RETIREMENT).sound


def test_when_every_problem_has_retired_the_run_ends_with_a_reason(run: RunDirectory, verifiers: Verifiers) -> None:
    schedule = Schedule(kind="sync", steps=9)
    collector = build(run, verifiers, schedule, num_prompts=4, solved_rule=RETIREMENT)
    with pytest.raises(FatalError, match=r"all 4 problems are solved before batch 2 of 9: .* raise prompts"):
        collect(collector)
    assert collector.store.committed() == [0, 1]
    assert verify_history(run.path, schedule, 2, RETIREMENT).sound


def rewards_of(collector: Collector, rewards: Sequence[float]) -> Collector:
    """With a reward function that gives these to the samples of each group."""

    class Given:
        async def score_group(self, *given: Any) -> list[Verdict]:
            return [Verdict(reward=reward) for reward in rewards]

    collector.verifiers = dict.fromkeys(collector.verifiers, Given())  # type: ignore[arg-type]
    return collector


def test_groups_that_are_equal_as_float32_are_equal_everywhere(run: RunDirectory, verifiers: Verifiers) -> None:
    """Kept or refilled, the log and the pass rate call them equal and solved, as the learner does."""
    collector = rewards_of(build(run, verifiers, Schedule(kind="sync", steps=2), max_refills=1), [0.7 + 0.2 + 0.1, 1.0])
    found = batches(collect(collector))
    assert [len(batch.dropped) for batch in found] == [PROMPTS] * 2
    assert {drop.solved for batch in found for drop in batch.dropped} == {GROUP}
    assert {asked_solve_rate(batch) for batch in found} == {1.0}
    assert {event["pass_at_1"] for event in read_events(run.path, "evaluated")} == {1.0}


def test_an_engine_that_repeats_its_sample_raises_an_alarm(run: RunDirectory, verifiers: Verifiers) -> None:
    """Long answers of both samples of a group are alike; the engine says one in e^40 of each. A policy that is sure of
    its answer gives the same ones, and no alarm."""
    collector, quiet = (build(run, verifiers, Schedule(kind="sync", steps=steps)) for steps in (1, 2))
    answer = PretendEngines._answer

    def unlikely(*asked: Any) -> Completion:
        made = answer(engines_of(collector), *asked)
        return replace(made, logprobs=np.full(len(made.tokens), -40.0 / len(made.tokens), np.float32))

    engines_of(collector)._answer = unlikely  # type: ignore[method-assign]
    (batch,) = batches(collect(collector))
    assert batch.repeated == PROMPTS * (GROUP - 1)
    assert [alarm.rule.name for alarm in alarms(describe(batch, 0), quantized=False)] == ["samples_repeated"]
    assert batches(collect(quiet))[1].repeated == 0
    assert [event["repeated"] for event in read_events(run.path, "committed")] == [PROMPTS, 0]


def test_what_may_be_chance_is_no_repetition() -> None:
    contract = LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256="")
    one, other = Completion.given([1, 2, 3, 4], [-8.0] * 4), Completion.given([1, 2, 3, 5], [-8.0] * 4)
    sure = Completion.given([1, 2, 3, 4], [-1.0] * 4)
    for completions, count in (((one, other, one, one), 2), ((one, other), 0), ((sure,) * 8, 0), ((sure,) * 9, 8)):
        assert num_repeated([[one] for one in completions], contract) == count
    assert num_repeated([[one], [one]], replace(contract, top_p=0.5)) == 0, "cut at .5, a token is twice as likely"
    assert num_repeated([[one], [one]], replace(contract, top_p=0.5, kept_set=True)) == 1, "what is left says it all"
    assert num_repeated([[one], [one]], replace(contract, top_k=1)) == 0, "the best token alone is always the same"


def test_a_collector_that_starts_again_counts_rewards_without_reading_tokens(
    run: RunDirectory, verifiers: Verifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all batches so far but the newest, whose open groups it goes on with."""
    schedule = Schedule(kind="sync", steps=6)
    first = build(run, verifiers, schedule, num_prompts=6, solved_rule=RETIREMENT)
    easy = first.prompts.prompt(0).text.removesuffix("=")
    engines_of(first).solves = lambda digits, member: digits == easy or member == 0
    collect(first)
    read, read_whole = BatchStore.read, list[int]()

    def noted(store: BatchStore, index: int, *arguments: Any, **options: Any) -> Batch:
        if options.get("choose") is None:
            read_whole.append(index)
        return read(store, index, *arguments, **options)

    monkeypatch.setattr(BatchStore, "read", noted)
    again = build(run, verifiers, schedule, num_prompts=6, solved_rule=RETIREMENT)
    collect(again)
    assert read_whole == [5]
    assert again._solved.solved(6) == first._solved.solved(6) != {}


def test_rewards_see_special_tokens_where_the_recipe_says_so(run: RunDirectory, verifiers: Verifiers) -> None:
    """All but the one that ended the response, as with <think> in front of the thought."""
    for special_tokens, finish, text in ((False, "stop", "12"), (True, "stop", "1{}2"), (True, "length", "1{}2{}")):
        collector = build(run, verifiers, SYNC, special_tokens=special_tokens)
        tokenizer = collector.tokenizer
        (one,), (two,), end = tokenizer.encode("1"), tokenizer.encode("2"), tokenizer.eos_token_id
        completion = replace(Completion.given([one, end, two, end], [0.0] * 4), finish=finish)
        assert collector._text(completion) == text.replace("{}", tokenizer.eos_token)
