"""What the model does beyond Megatron's own: head in float32, activations computed again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.model import build as build_module
from megatron_bridge.model.build import PolicyModel, build_chunks, require_graphs
from megatron_bridge.model.logprobs import KeptRows
from megatron_bridge.model.packed_attention import PackedRows
from megatron_bridge.parallel.layout import Layout, initialize
from pipeline.data.batch import KeptSets
from pipeline.errors import ModelError
from tests.support.learners import leave_world

# Megatron-Core's own layers are built and called in ways that it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "vocab_size": 64,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    initialize(Layout(), seed=0, deadline_s=30.0)
    yield
    leave_world()


def build(**settings: Any) -> PolicyModel:
    config = ModelConfig.from_hf(CONFIG | settings.pop("config", {}))
    (model,) = build_chunks(config, Layout(), settings.pop("dtype", torch.float32), 1.0, **settings)
    return model


def score(model: PolicyModel) -> torch.Tensor:
    tokens = torch.arange(12)[None] * 5
    ends = torch.tensor([0, 7, 12], dtype=torch.int32)
    packed = PackedRows(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=7, max_seqlen_kv=7)
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    logprobs, _ = model(tokens, positions, None, labels=tokens, packed_seq_params=packed)
    assert isinstance(logprobs, torch.Tensor)
    return logprobs


def test_a_mixture_needs_no_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's router without TE, on a GPU too: it lacks a name there."""
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    score(build(config=EXPERTS)).sum().backward()


def test_a_mixture_computes_the_same_with_its_activation_fused() -> None:
    """As on a GPU. One of Megatron's kernels then weighs the experts' products, and keeps none of them."""
    plain, fused = build(config=EXPERTS), build(config=EXPERTS)
    fused.load_state_dict(plain.state_dict())
    for module in fused.modules():
        if hasattr(module, "config"):  # experts have their own copy
            module.config.bias_activation_fusion = True
    kept = []
    for model in (plain, fused):
        sizes = dict[int, int]()

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = score(model)
        found.sum().backward()
        kept.append(sum(sizes.values()))
    torch.testing.assert_close(score(fused), score(plain))
    for left, right in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)
    assert kept[1] < kept[0]


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole vocabulary", "kept sets"])
def test_logits_of_a_long_row_are_computed_in_pieces(monkeypatch: pytest.MonkeyPatch, is_cut: bool, tied: bool) -> None:
    """12 tokens, of which 5 may have logits at once: the same scores and gradients, and never more logits alive."""
    config = dict(tie_word_embeddings=tied)
    plain, pieces = build(config=config), build(config=config, recompute="full")
    pieces.load_state_dict(plain.state_dict())
    alive, sizes = weakref.WeakSet[Any](), list[int]()
    pieces.output_layer.register_forward_hook(lambda *given: _count(given[-1][0], alive, sizes))
    sets = KeptSets.of([[*range(5 * i % 64 + 1)] if i % 3 else [] for i in range(12)])
    found = []
    for model in (plain, pieces):
        model.kept = KeptRows.of(sets) if is_cut else None
        monkeypatch.setattr(build_module, "LOGITS_BYTES", 1 << 30 if model is plain else 5 * 64 * 4)
        model.eval()
        with torch.no_grad():
            scores = score(model)
        model.train()
        logprobs = score(model)
        model.kept = None  # of another micro-batch, which comes before the backward pass
        (logprobs * torch.arange(12)).sum().backward()
        found.append((scores, logprobs.detach(), [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(found[0], found[1])
    assert sizes == [5, 5, 2] * 2 + [2, 5, 5]
    assert (found[0][1] != 0).sum() == (8 if is_cut else 12)


def _count(logits: torch.Tensor, alive: weakref.WeakSet[Any], sizes: list[int]) -> None:
    assert not alive, "logits of another piece are still held"
    alive.add(logits)
    sizes.append(len(logits))


@pytest.mark.parametrize(
    ("setting", "refused"),
    [
        ({}, None),
        (dict(fp8="e4m3", fp8_recipe="blockwise"), None),
        (dict(fp8_recipe="delayed"), None),  # its default, without FP8
        (dict(cuda_graph_impl="transformer_engine"), "set cuda_graph_impl to local"),
        (dict(cuda_graph_scope=["attn"]), "leave cuda_graph_scope out"),
        (dict(transformer_impl="local"), "use Transformer Engine's layers"),
        (dict(num_moe_experts=4), "leave it out for a mixture"),
        (dict(pipeline_model_parallel_size=2), "set learner.pipeline_parallel to 1"),
        (dict(fp8="hybrid", fp8_recipe="delayed"), "use fp8_tensor or fp8_block"),
    ],
)
def test_layers_are_captured_only_where_their_shapes_are_one(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], refused: str | None
) -> None:
    taken = dict(
        cuda_graph_impl="local",
        cuda_graph_scope=[],
        transformer_impl="transformer_engine",
        num_moe_experts=None,
        pipeline_model_parallel_size=1,
        fp8=None,
        fp8_recipe="tensorwise",
    )
    config: Any = SimpleNamespace(**taken | setting)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ModelError, match="NCCL_GRAPH_REGISTER=0" if refused is None else refused):
        require_graphs(config)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    with nullcontext() if refused is None else pytest.raises(ModelError, match=refused):
        require_graphs(config)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_can_multiply_in_float32(tied: bool) -> None:
    model = build(dtype=torch.bfloat16, fp32_lm_head=True, config={"tie_word_embeddings": tied})
    seen: dict[str, torch.Tensor] = {}

    def keep(_: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]) -> None:
        seen.update(hidden=inputs[0], logits=output[0].clone())  # the backward pass overwrites them

    model.output_layer.register_forward_hook(keep)
    score(model).sum().backward()
    head = model.embedding.word_embeddings.weight if tied else model.output_layer.weight
    assert seen["hidden"].dtype == head.dtype == torch.bfloat16
    torch.testing.assert_close(seen["logits"], seen["hidden"].float() @ head.float().T, atol=1e-7, rtol=1e-5)
    assert head.grad is not None
    assert head.grad.dtype == torch.bfloat16


def test_without_it_the_head_keeps_the_dtype_of_the_model() -> None:
    model = build(dtype=torch.bfloat16)
    dtypes: list[torch.dtype] = []
    model.output_layer.register_forward_hook(lambda _m, _i, output: dtypes.append(output[0].dtype))
    score(model)
    assert dtypes == [torch.bfloat16]


@pytest.mark.parametrize("config", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(("recompute", "layers", "mlps"), [("none", 1, 1), ("selective", 1, 2), ("full", 2, 2)])
def test_recompute_runs_what_it_names_twice(config: dict[str, Any], recompute: Any, layers: int, mlps: int) -> None:
    model = build(recompute=recompute, config=config)
    calls = {"layer": 0, "mlp": 0}
    layer = model.decoder.layers[0]
    layer.register_forward_hook(lambda *_: calls.update(layer=calls["layer"] + 1))
    inner = layer.mlp.router if config else layer.mlp.linear_fc1
    inner.register_forward_hook(lambda *_: calls.update(mlp=calls["mlp"] + 1))
    score(model).sum().backward()
    assert calls == {"layer": layers, "mlp": mlps}
