"""Problems from a file or folder of rows: JSON Lines, Parquet, Hugging Face datasets (pipeline.tasks.rows)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pipeline.config.task_sections import DataTask
from pipeline.errors import RecipeError
from pipeline.tasks.base import HELD_OUT_ONE_IN, Problem, check_index, is_held_out, normalized
from pipeline.tasks.filtering import filtered
from precision.text import quoted

_BUILT_IN = ("math_verify", "python_tests", "exact_match")
"""Rewards with a short name; all are in pipeline.rewards.verifiers."""


class Data:
    """Problems of a file, all in memory. Held out are those of `held_out_path`, else 1 in 16 by prompt text.

    Raises RecipeError, with file and row, for anything that is not a problem, and for a training prompt that the
    held-out file holds too.
    """

    characters = None

    def __init__(self, section: DataTask) -> None:
        self.reward = f"pipeline.rewards.verifiers:{section.reward}" if section.reward in _BUILT_IN else section.reward
        self.chat_template = section.chat_template
        assert section.path is not None, "of a task with sources each is asked for by itself"
        problems, left_out = filtered(section.path, section)
        self.notes = (*left_out, *_repeated(section.path, problems))
        if section.held_out_path is None:
            self._training = [p for p in problems if not is_held_out(p.text)]
            self._held_out, told = _not_trained(self._training, [p for p in problems if is_held_out(p.text)])
            self.notes += told
        else:
            held_out, left_out = filtered(section.held_out_path, section)
            self.notes += left_out
            self._training, self._held_out = problems, held_out
            _refuse_overlap(section.path, problems, section.held_out_path, held_out)
        if not self._training or not self._held_out:
            raise RecipeError(
                f"{section.path}: {len(problems)} problems leave {len(self._training)} to train on and "
                f"{len(self._held_out)} held out (1 in {HELD_OUT_ONE_IN} by prompt text), expected some of both; "
                "set task.held_out_path"
            )

    @property
    def num_prompts(self) -> int:
        return len(self._training)

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    def problem(self, index: int) -> Problem:
        check_index(index, self.num_prompts, "problem")
        return self._training[index]

    def held_out(self, index: int) -> Problem:
        check_index(index, self.num_held_out, "held-out problem")
        return self._held_out[index]

    def demonstration(self, index: int) -> None:
        """There is none: the model can already answer."""


def _repeated(path: Path, problems: Sequence[Problem]) -> tuple[str, ...]:
    """What to say about prompts that come more than once. They stay: who repeats a prompt may mean it."""
    times = Counter(problem.text for problem in problems)
    again = len(problems) - len(times)
    if not again:
        return ()
    answers = Counter(text for text, _ in {(problem.text, problem.answer) for problem in problems})
    unsure = sum(count > 1 for count in answers.values())
    and_so = f"; {unsure} prompts come with different answers" if unsure else ""
    text, most = times.most_common(1)[0]
    return (
        f"{path}: {again} of {len(problems)} rows repeat the prompt of another{and_so}; {quoted(text)} comes {most} "
        "times in an epoch",
    )


def _not_trained(training: Sequence[Problem], held_out: list[Problem]) -> tuple[list[Problem], tuple[str, ...]]:
    """The held-out problems that training has in no other spelling, and what to say of the others. Training keeps its
    own: groups of a run are their places."""
    trained = {normalized(problem.text) for problem in training}
    kept = [problem for problem in held_out if normalized(problem.text) not in trained]
    out = len(held_out) - len(kept)
    said = "held-out prompts differ from one to train on in case or white space alone, and are left out"
    return kept, (f"{out} of {len(held_out)} {said}",) if out else ()


def _refuse_overlap(path: Path, training: Sequence[Problem], held_out_path: Path, held_out: Sequence[Problem]) -> None:
    kept_apart = {normalized(problem.text) for problem in held_out}
    shared = [problem.text for problem in training if normalized(problem.text) in kept_apart]
    if shared:
        raise RecipeError(
            f"{path} and {held_out_path} share {len(shared)} prompts, the first {quoted(shared[0])}; evaluation would "
            "measure memory: remove them from one of the two"
        )
