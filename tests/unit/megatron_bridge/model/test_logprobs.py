"""One rank; two ranks are tested in tests/integration/test_learner.py."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor

from megatron_bridge.model import logprobs as logprobs_module
from megatron_bridge.model.logprobs import vocab_parallel_logprobs
from tests.support.vocab_cases import CASES, assert_gradient, assert_values


def reference(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(logits.double() / temperature, -1)
    return logprobs.gather(-1, tokens[..., None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)


class Cuda(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def test_torch_on_a_gpu_is_said_loudly_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    logits = torch.randn(5, 1, 11, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(5)[:, None]
    expected, _ = vocab_parallel_logprobs(logits, tokens, temperature=1.0, group=None)
    assert not caplog.records
    for _ in range(2):
        found, _ = vocab_parallel_logprobs(logits.as_subclass(Cuda), tokens, temperature=1.0, group=None)
        assert torch.equal(found, expected)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "194 times" in record.message
    assert "Triton does not load" in record.message


def test_by_hand() -> None:
    # softmax of (0, ln 3) is (1/4, 3/4)
    logits = torch.tensor([[[0.0, math.log(3.0)]]])
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([[1]]), temperature=1.0, group=None)
    assert logprobs.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    # at temperature 1/2 the odds are squared: (1/10, 9/10)
    logprobs, _ = vocab_parallel_logprobs(logits, torch.tensor([[0]]), temperature=0.5, group=None)
    assert logprobs.item() == pytest.approx(math.log(0.1))


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradient_do_not_depend_on_chunks(
    monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int, temperature: float
) -> None:
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", rows_per_chunk * 11)
    generator = torch.Generator().manual_seed(1)
    logits = (5 * torch.randn(7, 2, 11, generator=generator, dtype=torch.float64)).requires_grad_()
    tokens = torch.randint(0, 11, (7, 2), generator=generator)
    weight = torch.randn(7, 2, generator=generator, dtype=torch.float64)
    wanted, wanted_entropy = reference(logits, tokens, temperature)
    (wanted_gradient,) = torch.autograd.grad((wanted * weight).sum(), logits)
    for overwrite in (False, True):
        ours = logits.detach().clone().requires_grad_()
        logprobs, entropy = vocab_parallel_logprobs(
            ours * 1.0, tokens, temperature=temperature, group=None, overwrite_logits=overwrite
        )
        (logprobs * weight).sum().backward()
        torch.testing.assert_close(logprobs, wanted)
        torch.testing.assert_close(entropy, wanted_entropy)
        torch.testing.assert_close(ours.grad, wanted_gradient)


def test_gradcheck() -> None:
    logits = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 5, (3, 2))
    assert torch.autograd.gradcheck(
        lambda x: vocab_parallel_logprobs(x, tokens, temperature=0.9, group=None)[0], (logits,)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_are_only_read_unless_asked(dtype: torch.dtype) -> None:
    leaf = torch.randn(4, 3, 9).to(dtype).requires_grad_()
    before = leaf.detach().clone()
    logprobs, entropy = vocab_parallel_logprobs(leaf, torch.zeros(4, 3, dtype=torch.long), temperature=0.5, group=None)
    logprobs.sum().backward()
    assert torch.equal(leaf.detach(), before)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert not entropy.requires_grad
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype


def test_overwritten_logits_refuse_a_second_backward() -> None:
    logits = torch.randn(2, 1, 4, requires_grad=True) * 1.0
    logprobs, _ = vocab_parallel_logprobs(
        logits, torch.zeros(2, 1, dtype=torch.long), temperature=1.0, group=None, overwrite_logits=True
    )
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_bf16_logits_are_summed_in_float32() -> None:
    logits = torch.randn(5, 1, 4096).bfloat16()
    tokens = torch.randint(0, 4096, (5, 1))
    logprobs, entropy = vocab_parallel_logprobs(logits, tokens, temperature=1.0, group=None)
    wanted, wanted_entropy = reference(logits, tokens, 1.0)
    torch.testing.assert_close(logprobs.double(), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), wanted_entropy, atol=1e-4, rtol=0)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0]]])
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([[1]]), temperature=1.0, group=None)
    assert logprobs.item() == pytest.approx(-2e4)
    assert entropy.item() == pytest.approx(0.0)


@pytest.mark.parametrize("name", CASES)
def test_hard_logits(name: str) -> None:
    case = CASES[name]()
    leaf = case.logits.detach().requires_grad_()
    logits = leaf.view_as(leaf)
    logprobs, entropy = vocab_parallel_logprobs(
        logits, case.tokens, temperature=case.temperature, group=None, overwrite_logits=case.overwrite
    )
    (gradient,) = torch.autograd.grad(logprobs, logits, case.upstream)
    exact = CASES[name]()
    assert_values(exact, logprobs.detach(), entropy)
    assert_gradient(exact, gradient)
