"""What somebody meant who wrote a word that is not known."""

from __future__ import annotations

from precision.text.near import did_you_mean, near


def test_the_nearest_word_comes_first() -> None:
    assert near("grpo", ["dapo", "gspo", "grpo_32b", "demo"])[0] == "gspo"
    assert did_you_mean("dmo", ["demo", "dapo"]) == "; did you mean demo?"


def test_nothing_is_said_where_nothing_is_near() -> None:
    assert did_you_mean("nccl", ["disk", "delta"]) == ""


def test_a_word_of_any_length_is_answered_at_once() -> None:
    assert near("x" * 10_000_000, ["x" * 70]) == []
