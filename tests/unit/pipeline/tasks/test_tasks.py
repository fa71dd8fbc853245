"""Tasks: the same index gives the same problem, and evaluation never meets a training prompt."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.task_sections import SortDigitsTask, SpellDigitsTask
from pipeline.errors import RecipeError
from pipeline.rewards.calling import resolve
from pipeline.rewards.verifiers import exact_match
from pipeline.tasks import Problem, PromptOrder, Task, build_task
from pipeline.tasks.task import GeneratedTask, is_held_out, uniform_int

GOLDEN_TRAINING = [Problem(text="99533907=", answer="03357999"), Problem(text="2306811=", answer="0112368")]
GOLDEN_HELD_OUT = Problem(text="407768652409151=", answer="001124455667789")
GOLDEN_DEMONSTRATION = ("30658=", "03568")
GOLDEN_ORDER = [5, 7, 2, 6, 0, 1, 4, 3]


def sort_digits(seed: int = 0, **keys: object) -> Task:
    return build_task(SortDigitsTask.model_validate(keys), seed)


def test_sort_digits_golden() -> None:
    """Written down once: a change of these breaks the resuming of every run."""
    task = sort_digits(seed=0)
    assert [task.problem(i) for i in (0, 1)] == GOLDEN_TRAINING
    assert task.held_out(0) == GOLDEN_HELD_OUT
    assert task.demonstration(0) == GOLDEN_DEMONSTRATION


@given(index=st.integers(0, 99_999), seed=st.integers(0, 2**63), size=st.tuples(st.integers(3, 9), st.integers(0, 9)))
def test_sort_digits_problems(index: int, seed: int, size: tuple[int, int]) -> None:
    low, high = size[0], size[0] + size[1]
    task = sort_digits(seed, min_digits=low, max_digits=high)
    for problem in (task.problem(index), task.held_out(index)):
        digits = problem.text.removesuffix("=")
        assert low <= len(digits) <= high
        assert problem.answer == "".join(sorted(digits))
        assert set(problem.text + problem.answer) <= set(task.characters or "")
    assert task.problem(index) == sort_digits(seed, min_digits=low, max_digits=high).problem(index)


@given(index=st.integers(0, 99_999), other=st.integers(0, 99_999), seeds=st.tuples(st.integers(0), st.integers(0)))
def test_held_out_prompts_are_never_trained_under_any_seed(index: int, other: int, seeds: tuple[int, int]) -> None:
    ours, theirs = (sort_digits(seed, min_digits=2, max_digits=3) for seed in seeds)
    demonstration = theirs.demonstration(other)
    assert demonstration is not None
    assert ours.held_out(index).text not in {theirs.problem(other).text, demonstration[0]}


def test_few_digits_still_split_completely() -> None:
    """All 1,000 three-digit prompts: drawn often enough, each side shows its own and the two never meet."""
    task = sort_digits(min_digits=3, max_digits=3)
    training = {task.problem(i).text for i in range(8000)}
    held_out = {task.held_out(i).text for i in range(2000)}
    assert training.isdisjoint(held_out)
    assert len(training | held_out) > 990
    assert 0.03 < len(held_out) / 1000 < 0.1


def test_lengths_and_digits_are_uniform() -> None:
    task = sort_digits()
    texts = [task.problem(i).text[:-1] for i in range(6000)]
    lengths = np.bincount([len(text) for text in texts])[4:17]
    assert np.all(np.abs(lengths / 6000 - 1 / 13) < 0.016)  # 4.6 standard errors
    digits = np.bincount([int(digit) for text in texts for digit in text])
    assert np.all(np.abs(digits / digits.sum() - 0.1) < 0.006)


def test_a_prompt_space_without_held_out_prompts_is_refused() -> None:
    words = ["a=", "b="]

    class TwoPrompts(GeneratedTask):
        characters, reward = "ab=", "x:y"

        def draw(self, rng: random.Random) -> Problem:
            return Problem(text=words[uniform_int(rng, 0, 1)], answer="")

    task = TwoPrompts(name="two", seed=0, num_prompts=2)
    assert not any(map(is_held_out, words))
    assert task.problem(0).text in words
    with pytest.raises(RecipeError, match="task two found no held-out problem"):
        task.held_out(0)


@pytest.mark.parametrize("index", [-1, 100])
def test_an_index_outside_the_epoch_is_refused(index: int) -> None:
    task = sort_digits(num_prompts=100)
    with pytest.raises(IndexError, match="expected 0 to 99"):
        task.problem(index)
    with pytest.raises(IndexError, match="expected 0 to 99"):
        task.held_out(index)


@pytest.mark.parametrize("noise", [0.0, 0.25, 1.0])
def test_demonstrations_move_each_digit_with_the_given_probability(noise: float) -> None:
    task = sort_digits(demonstration_noise=noise)
    moved = clipped = total = 0
    for index in range(1500):
        demonstration = task.demonstration(index)
        assert demonstration is not None
        prompt, target = demonstration
        answer = "".join(sorted(prompt[:-1]))
        assert len(target) == len(answer)
        for right, shown in zip(map(int, answer), map(int, target), strict=True):
            assert abs(right - shown) <= 1
            moved += right != shown
            clipped += right in (0, 9)
            total += 1
    # A move beyond 0 or 9 is clipped: half of the moves of those digits do not show.
    assert moved / total == pytest.approx(noise * (1 - 0.5 * clipped / total), abs=0.02)


def test_the_reward_is_an_exact_match() -> None:
    assert resolve(sort_digits().reward) is exact_match
    assert exact_match("21=", "12", "12") == 1.0
    for response in ("", "12 ", "012", "1", "21", "12\n"):
        assert exact_match("21=", response, "12") == 0.0


@given(num_prompts=st.integers(1, 400), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**9))
def test_every_epoch_asks_every_problem_once(num_prompts: int, seed: int, epoch: int) -> None:
    order = PromptOrder(num_prompts, seed)
    groups = range(epoch * num_prompts, (epoch + 1) * num_prompts)
    assert sorted(order.problem(group) for group in groups) == list(range(num_prompts))


def test_epochs_and_seeds_differ_and_the_order_is_written_down() -> None:
    def asked(seed: int, epoch: int) -> list[int]:
        order = PromptOrder(8, seed)
        return [order.problem(group) for group in range(8 * epoch, 8 * epoch + 8)]

    assert asked(0, 0) == GOLDEN_ORDER
    assert len({tuple(asked(seed, epoch)) for seed in range(5) for epoch in range(5)}) == 25


@pytest.mark.parametrize("value", [0, -1])
def test_order_refuses_nonsense(value: int) -> None:
    with pytest.raises(ValueError, match="num_prompts"):
        PromptOrder(value, 0)
    with pytest.raises(ValueError, match="group is -1"):
        PromptOrder(3, 0).problem(-1)


def test_spell_digits_golden() -> None:
    """Sorted, each digit followed by its letter: a for 0 … j for 9."""
    task = build_task(SpellDigitsTask(name="spell_digits", min_digits=7, max_digits=7), seed=0)
    problem = task.problem(3)
    digits = problem.text.removesuffix("=")
    assert problem.answer == "".join(digit + "abcdefghij"[int(digit)] for digit in sorted(digits))
    assert set(problem.text + problem.answer) <= set(task.characters or "")


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_spell_digits_demonstrations_mistake_three_digits(share: float) -> None:
    """3, 6 and 8 get the next letter (3e, 6h, 8j) at the given rate, every other digit its own."""
    section = SpellDigitsTask(name="spell_digits", demonstration_noise=0.0, misspelt_share=share)
    task = build_task(section, seed=0)
    wrong = hard = 0
    for index in range(400):
        demonstration = task.demonstration(index)
        assert demonstration is not None
        _, target = demonstration
        for digit, letter in zip(target[::2], target[1::2], strict=True):
            right = "abcdefghij"[int(digit)]
            if digit in "368":
                hard += 1
                wrong += letter != right
                assert letter in (right, chr(ord(right) + 1))
            else:
                assert letter == right
    assert abs(wrong / hard - share) < 0.05
