"""What a micro-batch tells Megatron's layers of its rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.cuda_graphs import ArgMetadata, _CudaGraphRunner

from launch.verify.layout_ranks import TEMPERATURE, make_batch, weights
from launch.verify.layouts import write_model
from megatron_bridge.step.micro_batches import MicroBatch, Split, TokenRows, plan_micro_batches
from megatron_bridge.step.passes import packed_rows
from pipeline.config.recipe import LearnerSection
from pipeline.errors import NonFiniteError
from precision.objectives.clipped import Clipped
from tests.support.learners import learner_here


def of_rows(*lengths: int) -> MicroBatch:
    none = torch.zeros(1, 0, dtype=torch.int64)
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return MicroBatch(tokens=none, labels=none, columns=none[0], index=none[0], row_ends=ends, places=np.zeros(0, int))


@pytest.mark.parametrize(
    ("longest", "told"), [(1, 128), (128, 128), (129, 256), (1024, 1024), (1025, 1280), (5000, 5120), (8191, 8192)]
)
def test_transformer_engine_meets_few_longest_rows(longest: int, told: int) -> None:
    """Rotations of each are cached; attention takes it as a bound. Megatron's own layers get the number itself."""
    on_host = of_rows(longest, 1)
    on_device = replace(on_host, row_ends=on_host.row_ends.clone())
    config: Any = SimpleNamespace(transformer_impl="transformer_engine", cuda_graph_impl="none")
    packed = packed_rows(on_host, on_device, config)
    assert (packed.max_seqlen_q, packed.max_seqlen_kv) == (told, told)
    assert packed.cu_seqlens_q is on_device.row_ends
    config.transformer_impl = "local"
    packed = packed_rows(on_host, on_device, config)
    assert packed.max_seqlen_q == longest
    assert packed.cu_seqlens_q is on_host.row_ends


def test_a_ratio_that_is_finite_but_not_usable_ends_the_step(tmp_path: Path) -> None:
    """The objective's checks are read after the pass, with weights and optimizer as they were."""
    write_model(tmp_path / "model", experts=False)
    section = LearnerSection(precision="fp32", micro_batch_tokens=192)
    objective = Clipped()
    with learner_here(
        tmp_path / "model", section, objective, temperature=TEMPERATURE, seed=0, total_steps=2
    ) as trained:
        batch = make_batch(0, trained.model_config.vocab_size)
        advantages, before = np.ones(batch.num_samples, np.float32), weights(trained)
        far = np.array(batch.rollout_logprobs)
        far[np.flatnonzero(batch.loss_mask)[-1]] = -60.0
        with pytest.raises(NonFiniteError, match="the objective refused a micro-batch"):
            trained.update(replace(batch, rollout_logprobs=far), advantages, None)
        assert np.array_equal(weights(trained), before)
        trained.update(batch, advantages, None)


def test_a_graph_of_a_layer_fits_every_micro_batch() -> None:
    """By Megatron's own comparison of a call's arguments with those that its graph of a layer was made of."""
    config: Any = SimpleNamespace(transformer_impl="transformer_engine", cuda_graph_impl="local")
    runner = object.__new__(_CudaGraphRunner)
    found = []
    for lengths in ([40, 30, 9], [63], [5] * 20, [64, 64, 64, 1]):
        tokens = [np.arange(length + 1, dtype=np.int32) for length in lengths]
        rows = TokenRows(tokens=tokens, starts=np.ones(len(tokens), np.int64))
        plan = plan_micro_batches(rows, micro_batch_tokens=64, split=Split(row_slots=8))
        for micro_batch in plan.micro_batches:
            hidden = torch.zeros(micro_batch.tokens.numel(), 1, 4)
            named = dict(hidden_states=hidden, packed_seq_params=packed_rows(micro_batch, micro_batch, config))
            found.append(named)
    runner.fwd_graph_input_arg_metas = []
    runner.fwd_graph_input_kwarg_metas = {name: ArgMetadata(value) for name, value in found[0].items()}
    assert len(found) == 2 + 1 + 3 + 4
    assert [runner.get_mismatch_errors((), named) for named in found] == [[]] * len(found)
    config.cuda_graph_impl = "none"
    longer = packed_rows(plan.micro_batches[-1], plan.micro_batches[-1], config)
    assert runner.get_mismatch_errors((), found[0] | dict(packed_seq_params=longer)), "what is compared"
