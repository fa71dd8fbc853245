from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launch.convert.new_model import new_model, new_model_like
from megatron_bridge.hf.headers import check_weights
from megatron_bridge.hf.model_config import Experts, ModelConfig, read_hf_config
from pipeline.errors import ModelError
from pipeline.tasks.tokenizer import Tokenizer

SIZES = Path(__file__).parents[4] / "pipeline" / "recipes" / "models" / "qwen3-0.6b"
SMALL: dict[str, Any] = dict(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, characters="0123456789=")


def test_loads_in_transformers_without_missing_or_unexpected_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    new_model(tmp_path / "m", **SMALL)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    assert tokenizer.encode("31=", add_special_tokens=False) == Tokenizer(tmp_path / "m").encode("31=")
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    with torch.no_grad():
        logits = model(torch.tensor([[2, 3, 4]])).logits
    assert logits.shape == (1, 3, 16)
    assert float(logits.softmax(-1).max()) < 0.15, "a new policy is near uniform over 16 tokens"


def test_experts_load_in_transformers_and_are_what_the_learner_expects(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    new_model(tmp_path / "m", **SMALL, experts=4, experts_per_token=2, expert_ffn=24)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    with torch.no_grad():
        assert float(model(torch.tensor([[2, 3, 4]])).logits.softmax(-1).max()) < 0.15
    config = ModelConfig.from_hf(read_hf_config(tmp_path / "m"))
    assert config.experts == Experts(count=4, per_token=2, ffn_size=24, normalized=True)
    check_weights(tmp_path / "m", config)


def test_initial_scales(tmp_path: Path) -> None:
    new_model(tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    expected = {
        "model.embed_tokens.weight": 0.5,
        "lm_head.weight": 0.02,
        "model.layers.0.self_attn.q_proj.weight": 128**-0.5,
        "model.layers.0.self_attn.o_proj.weight": (256 * 4) ** -0.5,
        "model.layers.1.mlp.down_proj.weight": (384 * 4) ** -0.5,
    }
    for name, std in expected.items():
        assert float(weights[name].std()) == pytest.approx(std, rel=0.05), name
    assert bool((weights["model.layers.0.self_attn.q_norm.weight"] == 1).all())


def test_seed_and_dtype(tmp_path: Path) -> None:
    for name, seed, dtype in (("a", 1, "float32"), ("b", 1, "float32"), ("c", 2, "float32"), ("d", 1, "bfloat16")):
        new_model(tmp_path / name, **SMALL, seed=seed, dtype=dtype)  # type: ignore[arg-type]
    a, b, c, d = (load_file(tmp_path / name / "model.safetensors")["lm_head.weight"] for name in "abcd")
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert d.dtype == torch.bfloat16
    assert torch.equal(a.bfloat16(), d)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kv_heads=3), r"heads 4 is not a multiple of kv_heads 3"),
        (dict(head_dim=7), r"head_dim is 7, .* even"),
        (dict(layers=0), r"layers is 0, expected a positive"),
        (dict(hidden=-1), r"hidden is -1"),
        (dict(characters=""), r"characters are ''"),
        (dict(characters="aba"), r"characters are 'aba'"),
        (dict(experts=0), r"experts is 0, expected a positive"),
        (dict(experts=2, expert_ffn=0), r"expert_ffn is 0"),
        (dict(experts=2, experts_per_token=3), r"experts_per_token is 3, expected at most experts 2"),
        (dict(expert_ffn=8), r"there are none; give experts too"),
        (dict(dtype="int8"), r"dtype is 'int8', expected float32 or bfloat16"),
    ],
)
def test_bad_shapes_are_refused_in_one_line_and_nothing_is_written(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        new_model(tmp_path / "m", **SMALL | change)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "m").exists()


def test_an_interrupted_one_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("launch.convert.new_model._write_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            new_model(tmp_path / "m", **SMALL)
    assert list(tmp_path.iterdir()) == []
    new_model(tmp_path / "m", **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def config_folder(tmp_path: Path, **changes: Any) -> Path:
    """The 0.6B sizes that come with the recipes, at two layers and a small vocabulary."""
    config = json.loads((SIZES / "config.json").read_text()) | dict(num_hidden_layers=2, vocab_size=4096) | changes
    (tmp_path / "sizes").mkdir()
    (tmp_path / "sizes" / "config.json").write_text(json.dumps(config))
    return tmp_path / "sizes"


def test_a_model_of_given_sizes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    new_model_like(tmp_path / "m", config_folder(tmp_path), characters="0123456789=", seed=3)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert model.dtype == torch.bfloat16
    weights = load_file(tmp_path / "m" / "model.safetensors")
    assert "lm_head.weight" not in weights, "the head is tied"
    assert weights["model.embed_tokens.weight"].shape == (4096, 1024)
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (8 * 128, 1024)
    assert weights["model.layers.1.mlp.down_proj.weight"].shape == (1024, 3072)
    config = read_hf_config(tmp_path / "m")
    assert ModelConfig.from_hf(config).rope_theta == 1e6
    assert "bos_token_id" not in config
    tokenizer = Tokenizer.load(tmp_path / "m", vocab_size=config["vocab_size"])
    assert (tokenizer.vocab_size, config["eos_token_id"]) == (13, tokenizer.eos_token_id)
    check_weights(tmp_path / "m", ModelConfig.from_hf(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(architectures=["LlamaForCausalLM"], model_type="llama"), "expected Qwen3 or Qwen3-MoE"),
        (dict(torch_dtype="float16"), "dtype is 'float16'"),
        (dict(vocab_size=12), "more than vocab_size 12 rows"),
    ],
)
def test_sizes_that_cannot_be_made(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        new_model_like(tmp_path / "m", config_folder(tmp_path, **changes), characters="0123456789=")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("size", ["hidden", "layers", "heads", "head_dim", "ffn", "experts"])
def test_a_model_beyond_the_memory_is_refused_before_it_is_begun(tmp_path: Path, size: str) -> None:
    with pytest.raises(ModelError, match=r"take .* while they are made, and .* of memory are free"):
        new_model(tmp_path / "m", **{size: 2**32})  # type: ignore[arg-type]
    assert not (tmp_path / "m").exists()
