"""The learner on real process groups: every layout must do the same arithmetic as one process, and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_bridge.parallel.layout import Layout
from pipeline.data.run_directory import RunDirectory
from pipeline.ports.weights import WeightCheck
from rollout_sglang.weights.expected_checksums import ExpectedChecksums
from tests.doubles.tiny_model import reference_logprobs, reference_model
from tests.integration.workers import learner_scenarios
from tests.support.ranks import run_ranks

LAYOUTS = {"one": Layout(), "tp2": Layout(tensor=2), "pp2": Layout(pipeline=2), "dp2": Layout(data=2)}
PARALLEL = [name for name in LAYOUTS if name != "one"]
MODELS = ("untied", "tied", "qwen2", "llama")
TEMPERATURE = 0.8


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny random models with weights large enough that mistakes show."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    root = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    built = {
        "untied": Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=32, tie_word_embeddings=False)),
        "tied": Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)),
        "llama": LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)),
    }
    for seed, (name, model) in enumerate(built.items()):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * 0.08 if parameter.dim() > 1 else parameter + 0.1 * noise)
        model.save_pretrained(root / name)
        (root / name / "tokenizer.json").write_text("{}")
    return root


class Runs(dict[str, Path]):
    """layout → folder of what its ranks found, run when first asked for. `one` also loads the checkpoint of `dp2`, and
    `pp2` that of `tp2`."""

    def __init__(self, models: Path, root: Path) -> None:
        super().__init__()
        self._models, self._root = models, root

    def __missing__(self, layout: str) -> Path:
        source = {"one": "dp2", "pp2": "tp2"}.get(layout)
        reshard = self[source] / "checkpoint" if source else None
        folder = self._root / layout
        folder.mkdir()
        sizes = LAYOUTS[layout]
        run_ranks(sizes.num_processes, learner_scenarios.measure, sizes, self._models, folder, reshard)
        self[layout] = folder
        return folder


class Found(dict[str, list[dict[str, Any]]]):
    """layout → what each rank found."""

    def __init__(self, runs: Runs) -> None:
        super().__init__()
        self._runs = runs

    def __missing__(self, layout: str) -> list[dict[str, Any]]:
        paths = sorted(self._runs[layout].glob("found_*.json"))
        self[layout] = [json.loads(path.read_text()) for path in paths]
        return self[layout]


@pytest.fixture(scope="session")
def runs(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(models, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def found(runs: Runs) -> Found:
    return Found(runs)


@pytest.mark.parametrize("layout", PARALLEL)
def test_ranks_agree(found: Found, layout: str) -> None:
    first, second = found[layout]
    own = dict(publish={}, traffic={})
    assert {**first, **own} == {**second, **own}


def test_stages_exchange_one_tensor_a_micro_batch_and_way_and_never_wait_for_the_device(found: Found) -> None:
    first, last = (rank["traffic"] for rank in found["pp2"])
    assert first == last
    ((tokens, one, hidden),) = first["shapes"]  # no exchange of shapes
    assert (one, hidden) == (1, 64)
    rows = learner_scenarios.make_batch(3)
    micro_batches = (len(rows.tokens) - rows.num_samples) / (1 - first["padding_share"]) / tokens
    assert micro_batches == pytest.approx(round(micro_batches))
    assert round(micro_batches) >= 2
    assert first["isend"] == first["irecv"] == round(micro_batches)
    assert "waits" not in first


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_transformers(models: Path, found: Found, layout: str, model: str) -> None:
    reference = reference_model(models / model)
    for i, ours in enumerate(found[layout][0][f"scores_{model}"]):
        row = torch.from_numpy(learner_scenarios.make_batch(7).sample_tokens(i)).long()
        with torch.no_grad():
            logits = reference(row[None]).logits[0, :-1].double() / TEMPERATURE
        theirs = torch.log_softmax(logits, -1).gather(1, row[1:, None])[:, 0]
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_is_what_was_loaded(models: Path, runs: Runs, layout: str, model: str) -> None:
    original = load_file(models / model / "model.safetensors")
    for path in runs[layout].glob(f"export_{model}_*.pt"):
        exported = torch.load(path, weights_only=True)
        assert exported.keys() == original.keys()
        assert all(torch.equal(exported[name], original[name]) for name in original)


@pytest.mark.parametrize("scenario", ["untied", "tied", "one_micro_batch", "plain_optimizer", "micro_batch_ess"])
@pytest.mark.parametrize("layout", PARALLEL)
def test_training_is_that_of_one_process(found: Found, layout: str, scenario: str) -> None:
    for ours, single in zip(
        found[layout][0][f"metrics_{scenario}"], found["one"][0][f"metrics_{scenario}"], strict=True
    ):
        for name in single.keys() - {"padding_share"}:
            assert ours[name] == pytest.approx(single[name], rel=1e-5, abs=1e-5), name


def test_micro_batches_and_optimizer_sharding_do_not_matter(found: Found) -> None:
    for layout in LAYOUTS:
        reference = found[layout][0]["metrics_untied"]
        for scenario in ("one_micro_batch", "plain_optimizer"):
            for ours, theirs in zip(found[layout][0][f"metrics_{scenario}"], reference, strict=True):
                for name in theirs.keys() - {"padding_share"}:
                    assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), (layout, name)


@pytest.mark.parametrize("model", ["untied", "tied"])
@pytest.mark.parametrize("layout", PARALLEL)
def test_parameters_move_as_in_one_process(models: Path, runs: Runs, layout: str, model: str) -> None:
    start = load_file(models / model / "model.safetensors")
    single = torch.load(runs["one"] / f"trained_{model}_0.pt", weights_only=True)
    for path in runs[layout].glob(f"trained_{model}_*.pt"):
        trained = torch.load(path, weights_only=True)
        for name, tensor in trained.items():
            assert not torch.equal(tensor, start[name]), f"{name} was not trained"
            torch.testing.assert_close(tensor, single[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_learns(found: Found, layout: str) -> None:
    losses = [metrics["nll"] for metrics in found[layout][0]["metrics_bf16"]]
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(found["one"][0]["metrics_bf16"][0]["nll"], rel=1e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_broken_numbers_stop_every_rank_alike(found: Found, layout: str) -> None:
    for rank in found[layout]:
        assert rank["guards"] == ["NonFiniteError"] * 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_is_bit_exact(found: Found, layout: str) -> None:
    assert all(rank["resume_bitwise"] for rank in found[layout])


@pytest.mark.parametrize("layout", ["pp2", "one"])
def test_a_checkpoint_loads_at_another_layout(found: Found, layout: str) -> None:
    for ours, straight in zip(found[layout][0]["after_reshard"], found["one"][0]["after_checkpoint"], strict=True):
        assert ours["loss"] == pytest.approx(straight["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(straight["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("layout", PARALLEL)
@pytest.mark.parametrize("rollout_format", ["fp8_tensor", "fp8_block"])
def test_fp8_emulation_does_not_depend_on_the_layout(found: Found, layout: str, rollout_format: str) -> None:
    single = np.array(found["one"][0][f"emulated_{rollout_format}"])
    plain = np.array(found["one"][0]["token_logprobs_untied"])
    assert np.abs(single - plain).mean() > 1e-3
    ours = np.array(found[layout][0][f"emulated_{rollout_format}"])
    # A rounding difference of 1e-7 may flip an e4m3 value, so a single token can differ by a whole e4m3 step.
    assert np.abs(ours - single).mean() < 0.1 * np.abs(single - plain).mean()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_publishing(models: Path, runs: Runs, found: Found, layout: str) -> None:
    policies = runs[layout] / "policy"
    assert RunDirectory(runs[layout]).published_version() == 1  # version 2 failed on the engines
    assert found[layout][0]["publish"]["load_s"] == 0.5
    assert all(rank["publish_failure"] == "no engine is left" for rank in found[layout])
    original = load_file(models / "tied" / "model.safetensors")
    for folder in (policies / "000001", runs[layout] / "exported"):
        written = load_file(folder / "model-00001.safetensors")
        assert written.keys() == original.keys()
        assert all(torch.equal(written[name], original[name]) for name in original)
        assert (folder / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_published_comes_with_its_proof(models: Path, runs: Runs, layout: str) -> None:
    """The probe is scored at temperature 1, as engines prefill, whatever the temperature of the sampling."""
    check = WeightCheck.load(runs[layout] / "policy" / "000001", 1)
    assert check is not None
    assert check.probe is not None
    assert TEMPERATURE != 1
    tied = reference_model(models / "tied")
    for row, logprobs in zip(check.probe.rows, check.probe.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, reference_logprobs(tied, row), atol=1e-4)
    written = load_file(runs[layout] / "policy" / "000001" / "model-00001.safetensors")
    digests = ExpectedChecksums(dtype=torch.float32, num_kv_heads=2, tied_embeddings=True)
    for name, tensor in written.items():
        digests.observe(name, tensor)
    assert check.digests == digests.digests()
