"""What `quant-map suggest` does around the measurement: sources, refusals, the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from launch.convert.new_model import new_model
from launch.quant_map.ranks import sampled
from launch.quant_map.suggest import (
    RecordedRows,
    ScoredRow,
    commented,
    halves,
    judged,
    prompts_of,
    read_map,
    recipe_of,
    recorded_rows,
    token_rows,
)
from pipeline.config.recipe import Recipe
from pipeline.data.batch import KeptSets, LogprobContract, Response, given_batch
from pipeline.data.routed_experts import RoutedExperts
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import ModelError
from precision.formats.quant_map import QuantMap, QuantMapFile

QUANT = QuantMap.for_decoder(2, "fp8_block")
NAMES = list(QUANT.groups)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    new_model(folder, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=64)
    return folder


@pytest.fixture
def recipe(model: Path) -> Recipe:
    return recipe_of(model, None, None, ())


def figures(ess: float) -> dict[str, float]:
    return dict(num_tokens=100, mean_abs=0.01, max_abs=0.1, k3=(1 - ess) / 2, ess=ess)


def result(path: tuple[str, ...]) -> dict[str, Any]:
    quant = QUANT.promoted(path)
    return dict(
        version=0,
        ess_floor=0.98,
        reached=True,
        start=figures(0.9),
        gap=figures(0.99),
        ranking=[
            dict(group=name, damage=0.1, extra_bytes=100, alone=figures(0.95), promoted=figures(0.91)) for name in NAMES
        ],
        path=[dict(group=name, extra_bytes=100, **figures(0.99)) for name in path],
        quant_map=quant.to_file().model_dump(mode="json"),
        rows=dict(count=8, tokens=200, sampled_by="model"),
        out=None,
    )


def test_a_model_starts_from_blocks_and_random_prompts(model: Path, recipe: Recipe) -> None:
    assert (recipe.rollout.precision, recipe.rollout.quant_map) == ("fp8_block", None)
    assert recipe_of(model, None, "fp8_tensor", ()).rollout.precision == "fp8_tensor"
    prompts = prompts_of(model, recipe, 3)
    assert [len(prompt) for prompt in prompts] == [16] * 3


def test_a_recipe_starts_from_its_own_format_and_prompts(model: Path) -> None:
    changed = [f"model.path={model}", "rollout.precision=fp8_tensor", "learner.fp8_emulation=true"]
    recipe = recipe_of(Path("demo"), None, None, changed)
    assert not recipe.learner.fp8_emulation
    assert recipe.rollout.precision == "fp8_tensor"
    assert prompts_of(Path("demo"), recipe, 2)[0] != prompts_of(Path("demo"), recipe, 2)[1]


def test_a_run_gives_rows_from_all_over_its_newest_batch(tmp_path: Path) -> None:
    contract = LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256="")
    run = RunDirectory(tmp_path)
    assert recorded_rows(run, 4, 5) is None
    for index in range(2):
        groups = [
            ([100 * index + 10 * group, 1, 2], [Response([sample] * 4, [-1.0] * 4, reward=0.0) for sample in range(2)])
            for group in range(4)
        ]
        BatchStore(run.batches).commit(given_batch(index, groups, contract))
    expected = [
        ScoredRow(tokens=[100 + 10 * group, 1, 2, 0, 0], sampled=[True, True], group=group) for group in range(4)
    ]
    assert recorded_rows(run, 4, 2) == RecordedRows(batch=1, samples=[0, 2, 4, 6], rows=expected)


def test_recorded_rows_are_scored_over_their_kept_sets_with_their_experts() -> None:
    """As the learner trains on them: six samples of a prompt of 3 and a response of 5 tokens, of which 2 are scored."""
    groups = [([group, 1, 2], [response(5)] * 2) for group in range(3)]
    contract = LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256="")
    batch = given_batch(0, groups, contract)
    total, numbers = len(batch.tokens), range(batch.num_response_tokens)
    experts = RoutedExperts(ids=np.arange(total, dtype=np.uint16).reshape(-1, 1, 1), known=np.ones(total, np.bool_))
    batch = replace(batch, kept=KeptSets.of([[number] for number in numbers]), experts=experts)
    store: Any = SimpleNamespace(read=lambda index, contract: batch)
    rows = [ScoredRow(tokens=[group, 1, 2, 5, 5], sampled=[True, True], group=group) for group in (0, 2)]
    found = RecordedRows(batch=0, samples=[1, 4], rows=rows).token_rows(store)
    assert [row.tolist() for row in found.tokens] == [row.tokens for row in rows]
    assert found.offsets.tolist() == token_rows(rows).offsets.tolist()
    assert found.kept is not None
    assert found.experts is not None
    assert found.kept.tokens.tolist() == [5 * sample + i for sample in (1, 4) for i in range(2)]
    assert found.experts.ids.ravel().tolist() == [8 * sample + i for sample in (1, 4) for i in range(5)]


def run_of(folder: Path, groups: list[tuple[list[int], list[Response]]]) -> RunDirectory:
    contract = LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256="")
    run = RunDirectory(folder)
    BatchStore(run.batches).commit(given_batch(0, groups, contract))
    return run


def response(length: int, learned: list[bool] | None = None) -> Response:
    learned = [True] * length if learned is None else learned
    return Response([5] * length, [-1.0 * one for one in learned], reward=0.0, learned=learned)


def test_long_prompts_leave_the_response_to_be_judged(tmp_path: Path) -> None:
    run = run_of(tmp_path, [([group] * 400, [response(200)] * 8) for group in range(16)])
    recorded = recorded_rows(run, 32, 64)
    assert recorded is not None
    rows = recorded.rows
    assert {(len(row.tokens), len(row.tokens) - len(row.sampled)) for row in rows} == {(464, 400)}
    chosen, held_out = halves(rows)
    assert (int(chosen.sum()), int(held_out.sum())) == (16 * 64, 16 * 64)
    assert token_rows(rows).offsets.tolist() == [64 * row for row in range(33)]
    of_token = np.repeat([row.group for row in rows], 64)
    assert set(of_token[chosen.numpy()]).isdisjoint(of_token[held_out.numpy()])
    assert len(set(of_token)) == 16


def test_tokens_that_no_engine_sampled_are_not_judged(tmp_path: Path) -> None:
    mask = [True, False, True, True]
    groups = [([group], [response(4, learned=mask), response(4, learned=[False] * 4)]) for group in range(2)]
    recorded = recorded_rows(run_of(tmp_path, groups), 8, 64)
    assert recorded is not None
    assert recorded.samples == [0, 2]
    chosen, held_out = halves(recorded.rows)
    assert chosen.tolist() == mask + [False] * 4
    assert held_out.tolist() == [False] * 4 + mask


def test_the_model_answers_the_whole_prompt() -> None:
    class Model:
        config = SimpleNamespace(max_position_embeddings=500)
        generation_config = SimpleNamespace(eos_token_id=0, pad_token_id=0)

        def generate(self, prompts: torch.Tensor, *, max_length: int, **_: Any) -> torch.Tensor:
            return torch.cat([prompts, torch.full((1, max_length - prompts.shape[1]), 9)], dim=1)

    (long, short) = sampled(Model(), [[3] * 400, [4]], 128, 1.0)
    assert (len(long.tokens), len(long.tokens) - len(long.sampled), long.group) == (500, 400, 0)
    assert (len(short.tokens), len(short.tokens) - len(short.sampled), short.group) == (129, 1, 1)
    with pytest.raises(ModelError, match="prompt 0 has 500 tokens, and the model's context 500"):
        sampled(Model(), [[3] * 500], 128, 1.0)


@pytest.mark.parametrize("holds", [True, False])
def test_whether_the_floor_is_held_is_measured(holds: bool) -> None:
    rows = [ScoredRow(tokens=[1, 2, 3], sampled=[True, True], group=group) for group in range(4)]

    def score(quant_map: QuantMap | None) -> torch.Tensor:
        is_plain = quant_map is None or (holds and not quant_map.formats)
        return torch.zeros(8, dtype=torch.float64) if is_plain else torch.linspace(-1.0, 1.0, 8, dtype=torch.float64)

    found = judged(score, QUANT, rows, costs=dict.fromkeys(NAMES, 100), ess_floor=0.98)
    assert found["reached"] is holds
    assert len(found["path"]) == len(NAMES)


def test_the_file_says_how_it_came_about_and_is_a_map(tmp_path: Path, model: Path) -> None:
    path = ("model.layers.1.mlp.down_proj", "model.layers.0.self_attn.qkv_proj")
    file = tmp_path / "map.yaml"
    file.write_text(commented(result(path), Path("demo")))
    assert "0.99000 with model.layers.1.mlp.down_proj (+100 bytes)" in file.read_text()
    assert yaml.safe_load(file.read_text())["base"] == "fp8_block"
    assert QuantMap.from_file(QuantMapFile.read(file), 2) == QUANT.promoted(path)
    shown = read_map(file, model)
    assert len(shown["exceptions"]) == 1 + 3
    # Of each layer: q 32, k and v 16 rows, o 32, gate, up and down 64 times 32.
    assert shown["quantized_share"] == pytest.approx(1 - (64 + 64) / (2 * (32 + 16 + 16 + 32 + 3 * 64)))
