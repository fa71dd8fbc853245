"""Log-probabilities over kept sets, against log_softmax in float64 of logits with -inf outside the sets.

Two and more ranks are tested in tests/integration/test_learner.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_bridge.model import logprobs as logprobs_module
from megatron_bridge.model.logprobs import KeptRows, is_local, rebase, vocab_parallel_logprobs
from pipeline.data.batch import KeptSets

VOCAB, SEQUENCE, BATCH = 13, 7, 2


def random_sets(tokens: Tensor, seed: int, vocab: int = VOCAB) -> KeptSets:
    """One set for each of `tokens` [sequence, batch], which holds it; every fifth row has none."""
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for row, token in enumerate(tokens.reshape(-1).tolist()):
        size = int(torch.randint(1, vocab + 1, (), generator=generator))
        others = torch.randperm(vocab, generator=generator)[:size].tolist()
        sets.append([] if row % 5 == 4 else sorted({token, *others}))
    return KeptSets.of(sets)


def kept_mask(sets: KeptSets, shape: tuple[int, ...]) -> Tensor:
    """bool of `shape` [sequence, batch, vocab]."""
    mask = torch.zeros(len(sets), shape[-1], dtype=torch.bool)
    rows = KeptRows.of(sets)
    mask[rows.owner, rows.tokens] = True
    return mask.view(shape)


def reference(logits: Tensor, tokens: Tensor, temperature: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """By masking; 0 in rows that keep nothing."""
    some = mask.any(-1, keepdim=True)
    masked = (logits.double() / temperature).masked_fill(~mask & some, -math.inf)
    logprobs = torch.log_softmax(masked, -1)
    entropy = -torch.where(mask, logprobs.exp() * logprobs.clamp(min=-1e300), 0).sum(-1)
    return torch.where(some[..., 0], logprobs.gather(-1, tokens[..., None])[..., 0], 0), entropy * some[..., 0]


def inputs(dtype: torch.dtype = torch.float64, seed: int = 3) -> tuple[Tensor, Tensor, Tensor, KeptSets]:
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(SEQUENCE, BATCH, VOCAB, generator=generator, dtype=torch.float64)).to(dtype)
    tokens = torch.randint(0, VOCAB, (SEQUENCE, BATCH), generator=generator)
    weight = torch.randn(SEQUENCE, BATCH, generator=generator, dtype=torch.float64)
    weight[1, 0] = 0.0
    return logits, tokens, weight, random_sets(tokens, seed)


def test_by_hand() -> None:
    # (1, 2, 5) / 8 without the last is (1/3, 2/3)
    logits = torch.tensor([[[0.0, math.log(2.0), math.log(5.0)]]])
    kept = KeptRows.of(KeptSets.of([[1, 0]]))
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([[1]]), temperature=1.0, group=None, kept=kept)
    assert logprobs.item() == pytest.approx(math.log(2 / 3))
    assert entropy.item() == pytest.approx(-math.log(1 / 3) / 3 - 2 * math.log(2 / 3) / 3)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("overwrite", [False, True])
def test_values_and_gradient(temperature: float, overwrite: bool) -> None:
    logits, tokens, weight, sets = inputs()
    exact = logits.clone().requires_grad_()
    wanted, wanted_entropy = reference(exact, tokens, temperature, kept_mask(sets, tuple(logits.shape)))
    (wanted * weight).sum().backward()
    ours = logits.clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(
        ours * 1.0,
        tokens,
        temperature=temperature,
        group=None,
        overwrite_logits=overwrite,
        kept=KeptRows.of(sets),
    )
    (logprobs * weight).sum().backward()
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.grad, exact.grad, rtol=0, atol=1e-12)
    assert not entropy.requires_grad


def test_sets_of_the_whole_vocabulary_change_nothing() -> None:
    logits, tokens, weight, _ = inputs()
    whole = KeptRows.of(KeptSets.of([range(VOCAB)] * tokens.numel()))
    found = []
    for kept in (None, whole):
        leaf = logits.clone().requires_grad_()
        logprobs, entropy = vocab_parallel_logprobs(leaf, tokens, temperature=0.8, group=None, kept=kept)
        (logprobs * weight).sum().backward()
        found.append((logprobs.detach(), entropy, leaf.grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_in_float32_and_gradients_in_the_dtype_of_the_logits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    leaf = (5 * torch.randn(20, 1, 4000, generator=generator)).to(dtype).requires_grad_()
    tokens = torch.randint(0, 4000, (20, 1), generator=generator)
    sets = random_sets(tokens, 1, 4000)
    logprobs, _ = vocab_parallel_logprobs(leaf, tokens, temperature=0.7, group=None, kept=KeptRows.of(sets))
    logprobs.sum().backward()
    exact = leaf.detach().double().requires_grad_()
    wanted, _ = reference(exact, tokens, 0.7, kept_mask(sets, tuple(leaf.shape)))
    wanted.sum().backward()
    assert logprobs.dtype == torch.float32
    assert leaf.grad is not None
    assert exact.grad is not None
    assert leaf.grad.dtype == dtype
    torch.testing.assert_close(logprobs.double(), wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("num_slices", [1, 13])
def test_slices_of_the_vocabulary_add_up(num_slices: int) -> None:
    """As tensor parallel ranks would; of 13 ranks, most hold no token of a set."""
    logits, tokens, weight, sets = inputs()
    rows, wanted, kept, width = logits.flatten(0, 1), tokens.reshape(-1), KeptRows.of(sets), VOCAB // num_slices
    parts = [rows[:, first : first + width] for first in range(0, VOCAB, width)]
    found = [logprobs_module.kept_statistics(p, wanted - i * width, 0.7, kept, i * width) for i, p in enumerate(parts)]
    top = torch.stack([peak for peak, _ in found]).amax(0)
    here = [is_local(wanted - i * width, width) for i in range(num_slices)]
    sums = sum(rebase(peak, one, top, mine) for (peak, one), mine in zip(found, here, strict=True))
    assert isinstance(sums, Tensor)
    exact = rows.clone().requires_grad_()
    logprobs, _ = reference(exact, wanted, 0.7, kept_mask(sets, tuple(rows.shape)))
    (logprobs * weight.reshape(-1)).sum().backward()
    some = kept.counts > 0
    torch.testing.assert_close((sums[1] - sums[0].log())[some], logprobs.detach()[some], rtol=0, atol=1e-12)
    gradient = []
    for i, part in enumerate(parts):
        target = torch.full_like(part, math.nan)
        arguments = (part, wanted - i * width, top + sums[0].log(), weight.reshape(-1) / 0.7, 0.7, target)
        logprobs_module.write_kept_gradient(*arguments, kept, i * width)
        gradient.append(target)
    torch.testing.assert_close(torch.cat(gradient, 1), exact.grad, rtol=0, atol=1e-12)


def test_what_was_not_kept_is_not_read() -> None:
    logits = torch.tensor([[[0.0, math.nan, 1.0]], [[math.nan, 0.0, math.inf]], [[math.nan] * 3]], requires_grad=True)
    kept = KeptRows.of(KeptSets.of([[0, 2], [1], []]))
    logprobs, entropy = vocab_parallel_logprobs(
        logits, torch.tensor([[0], [1], [2]]), temperature=1.0, group=None, kept=kept
    )
    logprobs.sum().backward()
    assert logprobs[:, 0].tolist() == pytest.approx([-math.log(1 + math.e), 0.0, 0.0])
    assert entropy[1:, 0].tolist() == [0.0, 0.0]
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[1:].any()


def test_a_kept_logit_that_is_not_finite_is_seen() -> None:
    logits = torch.tensor([[[0.0, math.nan, 1.0]], [[math.inf, 0.0, 1.0]], [[0.0, -math.inf, 1.0]]])
    kept = KeptRows.of(KeptSets.of([[0, 1]] * 3))
    logprobs, _ = vocab_parallel_logprobs(
        logits, torch.zeros(3, 1, dtype=torch.long), temperature=1.0, group=None, kept=kept
    )
    assert logprobs[:2].isnan().all()
    assert logprobs[2].item() == 0.0  # a token that the learner would never sample weighs nothing
