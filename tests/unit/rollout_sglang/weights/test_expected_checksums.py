"""Digests of engine parameters, from a stream of HF tensors, against a plain construction of what an engine holds."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from precision.formats.formats import dequantize_block, quantize_block
from rollout_sglang.weights.expected_checksums import ExpectedChecksums

LAYER = "model.layers.0"


def random_policy(*, vocabulary: int = 70, heads: int = 4, kv_heads: int = 2, bias: bool = False) -> dict[str, Tensor]:
    """A layer of width 128 and head size 64, and what is around it."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, 128),
        f"{LAYER}.self_attn.q_proj.weight": (heads * 64, 128),
        f"{LAYER}.self_attn.k_proj.weight": (kv_heads * 64, 128),
        f"{LAYER}.self_attn.v_proj.weight": (kv_heads * 64, 128),
        f"{LAYER}.self_attn.q_norm.weight": (64,),
        f"{LAYER}.self_attn.o_proj.weight": (128, heads * 64),
        f"{LAYER}.mlp.gate_proj.weight": (256, 128),
        f"{LAYER}.mlp.up_proj.weight": (256, 128),
        f"{LAYER}.mlp.down_proj.weight": (128, 256),
        "model.norm.weight": (128,),
        "lm_head.weight": (vocabulary, 128),
    }
    if bias:
        shapes |= {
            f"{LAYER}.self_attn.{name}_proj.bias": (size * 64,) for name, size in zip("qkv", (4, 2, 2), strict=True)
        }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def checksums_of(
    policy: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    ranks: int = 1,
    kv_heads: int = 2,
    tied: bool = False,
) -> tuple[dict[str, str], ...]:
    digests = ExpectedChecksums(dtype=dtype, num_kv_heads=kv_heads, tied_embeddings=tied, tensor_parallel=ranks)
    passed = dict(digests.watch(policy.items()))
    assert all(passed[name] is tensor for name, tensor in policy.items())
    return digests.digests()


def test_parts_are_joined_as_the_engine_stacks_them() -> None:
    policy = random_policy(bias=True)
    (found,) = checksums_of(policy)
    attention = f"{LAYER}.self_attn"
    stacked = {
        f"{attention}.qkv_proj.weight": [policy[f"{attention}.{name}_proj.weight"] for name in "qkv"],
        f"{attention}.qkv_proj.bias": [policy[f"{attention}.{name}_proj.bias"] for name in "qkv"],
        f"{LAYER}.mlp.gate_up_proj.weight": [policy[f"{LAYER}.mlp.{name}_proj.weight"] for name in ("gate", "up")],
    }
    for name, parts in stacked.items():
        assert found[name] == digest(torch.cat(parts))
    padded = torch.cat([policy["lm_head.weight"], torch.zeros(58, 128)])  # 70 rows → 128
    assert found["lm_head.weight"] == digest(padded)
    for name in ("self_attn.o_proj", "self_attn.q_norm", "mlp.down_proj"):
        assert found[f"{LAYER}.{name}.weight"] == digest(policy[f"{LAYER}.{name}.weight"])
    assert len(found) == len(policy) - 2 * 2 - 1


def test_the_order_of_the_stream_does_not_matter() -> None:
    policy = random_policy(bias=True)
    names = list(policy)
    random.Random(1).shuffle(names)
    assert checksums_of({name: policy[name] for name in names}) == checksums_of(policy)


def test_tensors_may_be_overwritten_once_they_passed() -> None:
    policy = random_policy()
    backwards = sorted(policy, reverse=True)
    digests = ExpectedChecksums(dtype=torch.float32, num_kv_heads=2)
    buffer = torch.empty(1)
    for name in backwards:
        buffer = policy[name].clone()
        digests.observe(name, buffer)
        buffer.zero_()
    assert digests.digests() == checksums_of(policy)


def test_values_are_hashed_in_the_dtype_of_the_engine() -> None:
    policy = random_policy()
    (found,) = checksums_of(policy, dtype=torch.bfloat16)
    assert found["model.norm.weight"] == digest(policy["model.norm.weight"].bfloat16())
    half = {name: tensor.bfloat16() for name, tensor in policy.items()}
    assert checksums_of(half, dtype=torch.bfloat16) == (found,)
    assert checksums_of(half, dtype=torch.float32) != checksums_of(policy, dtype=torch.float32)


def test_block_weights_are_hashed_as_what_they_stand_for() -> None:
    policy: dict[str, Tensor] = {}
    for name, tensor in random_policy().items():
        if name.endswith("_proj.weight"):
            policy[name], policy[f"{name}_scale_inv"] = quantize_block(tensor)
        else:
            policy[name] = tensor
    (found,) = checksums_of(policy)
    name = f"{LAYER}.mlp.down_proj.weight"
    assert found[name] == digest(dequantize_block(policy[name], policy[f"{name}_scale_inv"]).bfloat16())
    assert not [name for name in found if "scale" in name]
    policy[f"{name}_scale_inv"] = policy[f"{name}_scale_inv"] * 1.25
    (other,) = checksums_of(policy)
    assert {key for key in found if found[key] != other[key]} == {name}


@pytest.mark.parametrize("name", sorted(random_policy()))
def test_one_flipped_bit_changes_one_digest(name: str) -> None:
    policy = random_policy()
    (before,) = checksums_of(policy)
    policy[name].view(torch.int32).flatten()[3] ^= 1
    (after,) = checksums_of(policy)
    assert len([key for key in before if before[key] != after[key]]) == 1


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 2), (4, 2)])
def test_ranks_hold_their_shards(ranks: int, kv_heads: int) -> None:
    policy = random_policy(kv_heads=kv_heads)
    found = checksums_of(policy, ranks=ranks, kv_heads=kv_heads)
    attention = f"{LAYER}.self_attn"
    q, k, v, o = (policy[f"{attention}.{name}_proj.weight"] for name in "qkvo")
    for rank in range(ranks):
        head = rank * 2 // ranks  # of two key-value heads; with four ranks, two ranks share each
        own = slice(rank * 256 // ranks, (rank + 1) * 256 // ranks)
        stacked = torch.cat([q[own], k[head * 64 : head * 64 + 64], v[head * 64 : head * 64 + 64]])
        assert found[rank][f"{attention}.qkv_proj.weight"] == digest(stacked)
        assert found[rank][f"{attention}.o_proj.weight"] == digest(o[:, own])
        rows = torch.cat([policy["lm_head.weight"], torch.zeros(58, 128)])[
            rank * 128 // ranks : (rank + 1) * 128 // ranks
        ]
        assert found[rank]["lm_head.weight"] == digest(rows)
        assert found[rank]["model.norm.weight"] == digest(policy["model.norm.weight"])


def test_a_tied_head_is_no_parameter() -> None:
    (found,) = checksums_of(random_policy(), tied=True)
    assert "lm_head.weight" not in found


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_lie_one_after_the_other(ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    experts = f"{LAYER}.mlp.experts"
    shapes = {"gate": (32, 16), "up": (32, 16), "down": (16, 32)}
    policy = {
        f"{experts}.{number}.{name}_proj.weight": torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
        for number in (11, *range(11))
    }
    digests = ExpectedChecksums(dtype=torch.float32, num_kv_heads=2, num_experts=12, tensor_parallel=ranks)
    for name, tensor in policy.items():
        digests.observe(name, tensor)
    for rank, found in enumerate(digests.digests()):
        own = slice(rank * 32 // ranks, (rank + 1) * 32 // ranks)
        gate_up = [policy[f"{experts}.{n}.{name}_proj.weight"][own] for n in range(12) for name in ("gate", "up")]
        down = [policy[f"{experts}.{n}.down_proj.weight"][:, own] for n in range(12)]
        assert found == {
            f"{experts}.w13_weight": digest(torch.cat(gate_up)),
            f"{experts}.w2_weight": digest(torch.cat(down)),
        }


def test_a_part_that_never_came_is_named() -> None:
    policy = random_policy()
    del policy[f"{LAYER}.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match=r"1 parameters are incomplete, first .*qkv_proj\.weight \(k_proj, v_proj\)"):
        checksums_of(policy)
    with pytest.raises(ValueError, match="or its scale"):
        checksums_of({"a.weight": quantize_block(torch.ones(128, 128))[0]})
