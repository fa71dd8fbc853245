"""What `evenkeel trajectories show` says about a run that is not as it should be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from launch.convert.new_model import new_model
from launch.show.trajectories import as_mapping, export
from pipeline.data.batch import FINISH_REASONS, Batch
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import ModelError, RecipeError
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer
from tests.support.batches import CONTRACT, batch_of_episodes, batch_of_rewards
from tests.support.runs import evenkeel
from tests.support.written_runs import write_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    new_model(tmp_path / "base", hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=16)
    found = RunDirectory(write_run(tmp_path, 1, steps=1, overrides=dict(model=dict(path=str(tmp_path / "base")))))
    BatchStore(found.batches).commit(batch(tmp_path, [[1.0, 0.0]]))
    return found


def batch(folder: Path, rewards: list[list[float]], **given: Any) -> Batch:
    """… that was sampled with the tokenizer of the model in `folder`."""
    contract = replace(CONTRACT, tokenizer_sha256=Tokenizer.load(folder / "base").sha256)
    return batch_of_rewards(rewards, vocabulary=40, contract=contract, **given)


def test_log_probabilities_of_another_length_are_passed_over(run: RunDirectory) -> None:
    run.write_logprobs(0, np.zeros(1000, np.float32))
    done = evenkeel("trajectories", "show", run.path, 0)
    assert done.returncode == 0
    assert "no learner logprobs to compare with" in done.stdout


def test_parquet_and_json_lines_hold_the_same_rows(run: RunDirectory, tmp_path: Path) -> None:
    sampled = BatchStore(run.batches).read(0, None)
    gaps = np.linspace(-0.5, 0.25, len(sampled.rollout_logprobs), dtype=np.float32)
    run.write_logprobs(0, sampled.rollout_logprobs + gaps)
    for kind in ("parquet", "jsonl"):
        assert export(run.path, tmp_path / f"out.{kind}")["samples"] == 2
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    rows = [
        row | dict(reward_parts=dict(row["reward_parts"]))
        for row in pq.read_table(tmp_path / "out.parquet").to_pylist()
    ]
    assert rows == lines == as_mapping(run.path, 0, 8)["samples"]
    assert [row["reward"] for row in rows] == [1.0, 0.0]
    first = int(sampled.response_lengths[0])
    assert rows[0]["log_ratio_mean"] == pytest.approx(float(gaps[:first].mean()), abs=1e-6)
    assert rows[1]["log_ratio_abs_max"] == pytest.approx(float(np.abs(gaps[first:]).max()), abs=1e-6)
    assert rows[0]["response_tokens"] == first


def test_rows_of_episodes_are_the_same_in_both_formats(run: RunDirectory, tmp_path: Path) -> None:
    contract = replace(CONTRACT, tokenizer_sha256=Tokenizer.load(tmp_path / "base").sha256)
    sampled = batch_of_episodes([[1.0, 0.0]], forked=True, index=1, seed=3, vocabulary=40, contract=contract)
    BatchStore(run.batches).commit(sampled)
    for kind in ("parquet", "jsonl"):
        export(run.path, tmp_path / f"out.{kind}", first=1)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row | dict(reward_parts={}, metadata=json.loads(row["metadata"])) for row in rows] == lines
    assert sampled.episodes is not None
    assert [line["episode"] for line in lines] == sampled.episodes.number.tolist()
    assert [sum(one["tokens"] for one in line["said"]) for line in lines] == sampled.response_lengths.tolist()


def test_a_sample_that_the_learner_has_not_looked_at_has_no_log_ratio(run: RunDirectory, tmp_path: Path) -> None:
    sampled = BatchStore(run.batches).read(0, None)
    learner, first = sampled.rollout_logprobs.copy(), int(sampled.response_lengths[0])
    learner[:first] = np.nan
    learner[first] += 0.5
    run.write_logprobs(0, learner)
    written = tmp_path / "out.jsonl"
    assert export(run.path, written)["samples"] == 2
    unseen, seen = map(json.loads, written.read_text().splitlines())
    assert (unseen["log_ratio_mean"], unseen["log_ratio_abs_max"]) == (None, None)
    assert seen["log_ratio_mean"] == pytest.approx(0.5 / int(sampled.response_lengths[1]), abs=1e-6)
    assert seen["log_ratio_abs_max"] == pytest.approx(0.5, abs=1e-6)


def test_filters_keep_what_they_name(run: RunDirectory, tmp_path: Path) -> None:
    BatchStore(run.batches).commit(batch(tmp_path, [[0.5, 0.25]], index=1, seed=1))
    text = as_mapping(run.path, 1, 1)["samples"][0]["response"]

    def kept(**chosen: Any) -> list[tuple[int, float]]:
        export(run.path, tmp_path / "out.jsonl", **chosen)
        lines = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
        return [(line["batch"], line["reward"]) for line in lines]

    assert kept() == [(0, 1.0), (0, 0.0), (1, 0.5), (1, 0.25)]
    assert kept(first=1, end=2) == [(1, 0.5), (1, 0.25)]
    assert kept(reward_min=0.25, reward_max=0.5) == [(1, 0.5), (1, 0.25)]
    assert (1, 0.5) in kept(search=text)
    assert kept(search="no such text") == []
    with pytest.raises(RecipeError, match="has no batch in these steps; committed are 0 to 1"):
        kept(first=5, end=9)


def test_samples_of_one_finish_or_source_are_kept(run: RunDirectory, tmp_path: Path) -> None:
    path = write_run(
        tmp_path, 1, steps=1, name="mixed", overrides=dict(model=dict(path=str(tmp_path / "base")), task=_two_sources())
    )
    mixed = replace(
        batch(tmp_path, [[1.0, 0.0], [0.5, 0.25]]),
        problem=np.array([0, 0, 7, 7]),
        sources=dict(sums=range(7), words=range(7, 9)),
        finish=np.array([FINISH_REASONS.index(reason) for reason in ("stop", "length", "stop", "length")], np.uint8),
    )
    BatchStore(RunDirectory(path).batches).commit(mixed)

    def kept(*options: str) -> list[float]:
        done = evenkeel("trajectories", "export", path, tmp_path / "out.jsonl", *options)
        assert done.returncode == 0, done.stderr
        return [json.loads(line)["reward"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]

    assert kept("--finish", "length") == [0.0, 0.25]
    assert kept("--source", "words") == [0.5, 0.25]
    assert kept("--source", "sums", "--finish", "stop") == [1.0]
    done = evenkeel("trajectories", "export", path, tmp_path / "out.jsonl", "--source", "wrods")
    assert done.returncode == 1
    assert f"--source is 'wrods', but the sources of {path} are sums, words; name one of them" in done.stderr
    with pytest.raises(RecipeError, match=r"the task of .* has no task\.sources; leave --source out"):
        export(run.path, tmp_path / "out.jsonl", source="sums")


def _two_sources() -> dict[str, object]:
    sources = [dict(path="sums.jsonl"), dict(path="words.jsonl")]
    return dict(name="data", reward="my:own", sources=sources)


def test_a_run_whose_model_is_gone_is_read_with_a_model_of_its_own(run: RunDirectory, tmp_path: Path) -> None:
    said = as_mapping(run.path, 0, 8)
    (tmp_path / "base").rename(run.model)
    assert as_mapping(run.path, 0, 8) == said
    assert evenkeel("trajectories", "show", run.path, 0).returncode == 0
    run.model.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=r"neither in .*base nor in a model of the run; put the model back there"):
        as_mapping(run.path, 0, 8)


def test_a_batch_is_not_read_with_another_tokenizer(run: RunDirectory, tmp_path: Path) -> None:
    """It would show other words than were said."""
    write_character_tokenizer(tmp_path / "base", "zyxwvutsrqponmlkjihgfedcba9876543210=+ ")
    done = evenkeel("trajectories", "show", run.path, 0)
    assert (done.returncode, "response" in done.stdout) == (1, False)
    assert done.stderr.startswith(f"error: the tokenizer that {run.path} was sampled with is neither in ")
