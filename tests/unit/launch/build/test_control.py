"""What the controller of a run may do and measure."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch.build import engines
from launch.build.components import build_quant_map
from launch.build.control import EmulationMeter, build_ladder, evidence_of, older_maps
from launch.convert.new_model import new_model
from megatron_bridge.step.micro_batches import TokenRows
from pipeline.config.loader import recipe_from
from pipeline.config.recipe import Recipe
from pipeline.data.batch import Batch, KeptSets, Response, Share, given_batch
from pipeline.data.membership import Member
from pipeline.data.quant_maps import NumberedMaps, digest_of
from pipeline.data.routed_experts import RoutedExperts
from pipeline.data.run_directory import RunDirectory, unfenced
from pipeline.errors import NonFiniteError
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import RolloutFormat
from tests.support.batches import CONTRACT, batch_of_rewards, read_by
from tests.support.runs import a_recipe


class Learner:
    """One rank, as far as it is asked here."""

    emulation = None

    def __init__(self, layers: str = "megatron") -> None:
        self.layers = layers

    def tell(self, action: Callable[[], Any]) -> Any:
        return action()


def recipe_of(folder: Path, **sections: Any) -> Recipe:
    if not (folder / "model").exists():
        new_model(folder / "model", hidden=32, ffn=32, head_dim=16)
    data = dict(
        run=dict(name="run", root=str(folder), steps=4),
        model=dict(path=str(folder / "model")),
        task=dict(name="sort_digits"),
        rollout=dict(precision="fp8_block"),
        controller=dict(),
    )
    return recipe_from(data | sections, source="test")


def test_formats_that_the_learner_follows_are_not_changed(tmp_path: Path) -> None:
    assert build_ladder(recipe_of(tmp_path)).groups
    assert build_ladder(recipe_of(tmp_path, learner=dict(fp8_emulation=True))).groups == ()


def test_engines_on_the_learner_s_gpus_are_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, weights=dict(channel="ipc"))
    ladder = build_ladder(recipe)
    assert ladder.groups
    assert ladder.engines_may_restart
    monkeypatch.setattr(engines, "has_cuda", lambda: True)
    ladder = build_ladder(recipe)
    assert (ladder.groups, ladder.engines_may_restart) == ((), False)


def test_with_transformer_engine_layers_nothing_is_measured() -> None:
    base = QuantMap.for_decoder(2, RolloutFormat.FP8_BLOCK)
    meter = EmulationMeter(Learner("transformer_engine"), base, 64)  # type: ignore[arg-type]
    given = batch_of_rewards([[1.0, 0.0]])
    assert meter("quantization", given, ()) is None
    assert meter("groups", given, tuple(base.groups)) is None


def test_a_lost_engine_s_map_is_published_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_model(tmp_path / "model", hidden=32, ffn=32, head_dim=16)
    recipe = a_recipe(
        tmp_path,
        run=dict(name="run", steps=4),
        model=dict(path=str(tmp_path / "model")),
        rollout=dict(precision="fp8_block", engines=2),
        controller=dict(),
    )
    run, base = RunDirectory(recipe.directory), build_quant_map(recipe)
    assert base is not None
    run.freeze(recipe)
    NumberedMaps(run.quant_maps, unfenced).write(0, base.to_file())
    newest = digest_of(base.promoted(("model.layers.1.mlp.down_proj",)).to_file())
    for member in (
        Member(0, "http://127.0.0.1:9", 1, newest),
        Member(1, "http://127.0.0.1:9", 1, digest_of(base.to_file())),
    ):
        run.membership().announce(member)
    older = older_maps(run, recipe, Learner())  # type: ignore[arg-type]
    assert older(newest) == [base], "it may have been announced a moment ago"
    when = time.time() - recipe.rollout.start_deadline_s - 1
    os.utime(run.membership().folder, (when, when))
    assert older(newest) == []
    monkeypatch.setattr("launch.build.control.look_with", lambda key: lambda member: "unverified")
    assert older_maps(run, recipe, Learner())(newest) == [base], "it answers"  # type: ignore[arg-type]


def long_batch(groups: int, siblings: int, length: int) -> Batch:
    """Prompts of 3 tokens with answers of `length` tokens, all of them sampled, by number."""
    answers = iter(np.arange(length) + 1000 * sample for sample in range(groups * siblings))
    made = [
        ([7, 8, 9], [Response(next(answers).tolist(), [-1.0] * length, reward=0.0) for _ in range(siblings)])
        for _ in range(groups)
    ]
    return given_batch(0, made, CONTRACT)


def without_first(batch: Batch, count: int) -> Batch:
    """The batch whose first samples are not learned from (`Completion.unlearned`)."""
    mask = batch.loss_mask.copy()
    mask[: batch.response_offsets[count]] = False
    return replace(batch, loss_mask=mask)


@pytest.mark.parametrize("num_tokens", [1, 30, 10**6])
def test_evidence_is_of_samples_that_are_learned_from(num_tokens: int) -> None:
    batch = without_first(batch_of_rewards([[1.0, 0.0]] * 6, seed=2, unsampled=0.3), 3)
    rows, chosen = evidence_of(batch, num_tokens)
    assert chosen.any()
    whole = [row.tolist() for row in batch.rows()]
    assert all(row.tolist() not in whole[:3] for row in rows.tokens)
    if num_tokens == 10**6:
        assert [row.tolist() for row in rows.tokens] == ends(batch)[3:]
        assert int(chosen.sum()) == batch.num_sampled_tokens


def ends(batch: Batch) -> list[list[int]]:
    """The samples up to their last sampled token."""
    found = []
    for row, prompt, first, last in zip(
        batch.rows(), batch.prompt_lengths, batch.response_offsets, batch.response_offsets[1:], strict=False
    ):
        sampled = np.flatnonzero(batch.loss_mask[first:last])
        found.append(row[: prompt + (sampled[-1] + 1 if len(sampled) else 0)].tolist())
    return found


def test_long_answers_give_their_beginnings_from_all_parts_of_the_batch() -> None:
    batch = long_batch(groups=8, siblings=4, length=8000)
    rows, chosen = evidence_of(batch, 4096)
    assert int(chosen.sum()) == 4096
    assert rows.lengths.tolist() == [3 + 256] * 16
    groups = {int(row[3]) // 1000 // 4 for row in rows.tokens}
    assert groups == set(range(8))
    few, chosen = evidence_of(long_batch(groups=1, siblings=2, length=8000), 4096)
    assert few.lengths.tolist() == [3 + 256] * 2


def test_evidence_keeps_the_sets_and_experts_of_its_tokens() -> None:
    """The batch's loss is over them, so that the part of quantization must be, too."""
    batch = long_batch(groups=20, siblings=1, length=40)
    numbers, total = np.arange(len(batch.loss_mask)), len(batch.tokens)
    experts = RoutedExperts(ids=np.arange(total, dtype=np.uint16).reshape(-1, 1, 1), known=np.ones(total, np.bool_))
    batch = replace(batch, kept=KeptSets.of([[number] for number in numbers.tolist()]), experts=experts)
    rows, _ = evidence_of(batch, 64)
    assert rows.lengths.tolist() == [3 + 4] * 16
    assert rows.kept is not None
    assert rows.experts is not None
    samples = [int(row[3]) // 1000 for row in rows.tokens]
    assert rows.kept.tokens.tolist() == [40 * sample + i for sample in samples for i in range(4)]
    assert rows.experts.ids.ravel().tolist() == [43 * sample + i for sample in samples for i in range(7)]


def test_ranks_hold_evidence_of_their_own_samples() -> None:
    batch = batch_of_rewards([[1.0, 0.0]] * 6, seed=2)
    expected, chosen = evidence_of(batch, 30)
    ranks = np.arange(batch.num_samples) // 3 % 2
    held: list[list[list[int]]] = []
    for rank in range(2):
        share = replace(read_by(batch, Share(ranks=ranks, rank=rank)), loss_mask=batch.loss_mask)
        found, marked = evidence_of(share, 30)
        assert torch.equal(marked, chosen)
        assert found.lengths.tolist() == expected.lengths.tolist()
        held.append([row.tolist() for row in found.tokens])
    assert [one + other for one, other in zip(*held, strict=True)] == [row.tolist() for row in expected.tokens]


def meter_that_sees(gap: float, monkeypatch: pytest.MonkeyPatch) -> EmulationMeter:
    """A meter of a learner in which the emulation moves every second token by so much."""

    def row_scorer(learner: Any, rows: TokenRows) -> Callable[[QuantMap | None], torch.Tensor]:
        plain = torch.zeros(int(rows.offsets[-1]), dtype=torch.float64)
        moved = plain - gap * (torch.arange(len(plain)) % 2)
        return lambda quant_map: plain if quant_map is None else moved

    monkeypatch.setattr("megatron_bridge.step.host_weights.row_scorer", row_scorer)
    return EmulationMeter(Learner(), QuantMap.for_decoder(2, RolloutFormat.FP8_BLOCK), 64)  # type: ignore[arg-type]


def test_a_huge_gap_is_a_low_ess_and_a_broken_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = long_batch(groups=4, siblings=1, length=10)
    for gap in (60.0, 2000.0):
        found = meter_that_sees(gap, monkeypatch)("quantization", batch, ())
        assert found == pytest.approx(np.log(2.0), rel=1e-6), "half of the tokens decide"
    with pytest.raises(NonFiniteError, match=r"batch 0: scores with the engines' formats emulated are not finite"):
        meter_that_sees(np.nan, monkeypatch)("quantization", batch, ())
