"""Answers that continue each other, joined into one completion."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipeline.data.batch import Completion, KeptSets
from pipeline.data.routed_experts import RoutedExperts


def test_the_tokens_between_answers_were_not_sampled() -> None:
    thought = replace(
        Completion.given((1, 2, 3), (-0.1, -0.2, -0.3)),
        versions=np.array([4, 4, 5], np.int32),
        finish="length",
        queued_s=0.5,
        generated_s=1.0,
    )
    answer = replace(Completion.given((9,), (-0.4,), version=6), engine=1, queued_s=0.25, generated_s=2.0)
    joined = Completion.joined([thought, answer], [(7, 8)])
    np.testing.assert_array_equal(joined.tokens, np.array([1, 2, 3, 7, 8, 9], np.int32), strict=True)
    logprobs = np.array([-0.1, -0.2, -0.3, 0.0, 0.0, -0.4], np.float32)
    np.testing.assert_array_equal(joined.logprobs, logprobs, strict=True)
    np.testing.assert_array_equal(joined.versions, np.array([4, 4, 5, 5, 5, 6], np.int32), strict=True)
    np.testing.assert_array_equal(joined.loss_mask, [True, True, True, False, False, True], strict=True)
    assert (joined.finish, joined.engine, joined.queued_s, joined.generated_s) == ("stop", 1, 0.75, 3.0)


def test_each_part_keeps_the_routes_that_it_was_sampled_with() -> None:
    """A prompt of one token, two of the thought, two given, one of the answer. The routes of the thought say 1, those
    of the answer 2. What was lost of the thought, a later prefill cannot bring back."""

    def routes(value: int, known: list[bool]) -> RoutedExperts:
        ids = np.full((len(known), 1, 1), value, np.uint8)
        return RoutedExperts(ids=np.where(np.array(known)[:, None, None], ids, 0), known=np.array(known))

    thought = replace(Completion.given((1, 2), (-0.1, -0.2)), experts=routes(1, [True, True, False]))
    answer = replace(Completion.given((9,), (-0.4,)), experts=routes(2, [False, True, True, True, True, False]))
    joined = Completion.joined([thought, answer], [(7, 8)]).experts
    assert joined is not None
    assert joined.ids[:, 0, 0].tolist() == [1, 1, 2, 2, 2, 0]
    assert joined.known.tolist() == [True] * 5 + [False]
    assert Completion.joined([replace(thought, experts=None), answer], [(7, 8)]).experts is None
    retracted = replace(thought, experts=routes(1, [False, True, False]))
    whole = replace(answer, experts=routes(2, [True] * 5 + [False]))
    joined = Completion.joined([retracted, whole], [(7, 8)]).experts
    assert joined is not None
    assert joined.ids[:, 0, 0].tolist() == [0, 1, 2, 2, 2, 0]
    assert joined.known.tolist() == [False, *[True] * 4, False]


def test_given_tokens_have_no_kept_sets() -> None:
    thought = replace(Completion.given((1, 2), (-0.1, -0.2)), kept=KeptSets.of([[1, 4], [2]]))
    answer = replace(Completion.given((9,), (-0.4,)), kept=KeptSets.of([[9, 3]]))
    joined = Completion.joined([thought, answer], [(7, 8)]).kept
    assert joined is not None
    assert joined.counts.tolist() == [2, 1, 0, 0, 2]
    assert joined.tokens.tolist() == [1, 4, 2, 3, 9]
    assert Completion.joined([thought, replace(answer, kept=None)], [(7, 8)]).kept is None


def test_an_answer_that_nothing_follows_stays_as_it_is() -> None:
    answer = replace(
        Completion.given((1, 2), (-0.1, -0.2)),
        kept=KeptSets.of([[1, 4], [2]]),
        experts=RoutedExperts(ids=np.ones((3, 1, 1), np.uint8), known=np.ones(3, np.bool_)),
    )
    joined = Completion.joined([answer], [])
    assert joined.tokens.tolist() == [1, 2]
    assert (joined.kept is not None, joined.experts is not None and len(joined.experts)) == (True, 3)


def test_of_three_answers_each_keeps_the_routes_that_it_was_sampled_with() -> None:
    """A prompt of one token, answers of one token each, one token given between. Later answers need only report the
    routes from the last token of the answer before."""

    def routes(value: int, rows: int) -> RoutedExperts:
        return RoutedExperts(ids=np.full((rows, 1, 1), value, np.uint8), known=np.ones(rows, np.bool_))

    answers = [
        replace(Completion.given((5,), (-0.1,)), experts=routes(n, rows)) for n, rows in ((1, 2), (2, 4), (3, 6))
    ]
    cut = [answers[0], *(replace(one, experts=one.experts[-3:]) for one in answers[1:] if one.experts is not None)]
    for each in (answers, cut):
        joined = Completion.joined(each, [(7,), (8,)]).experts
        assert joined is not None
        assert joined.ids[:, 0, 0].tolist() == [1, 2, 2, 3, 3, 3]
