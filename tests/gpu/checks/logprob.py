"""Log-probability and entropy of tokens from bfloat16 logits: time against reading the logits once, memory, error.

The floor of the forward pass is reading the logits once, of the backward pass reading and writing them once, both at
the bandwidth of a copy measured in the same process. 8,192 × 151,936 bfloat16 logits are 2.49 GB: at 3 TB/s, 0.83 ms
and 1.66 ms. The reference is log-softmax in float64 of some of the rows; its entropy sums -p·log p.
"""

from __future__ import annotations

from typing import Any

from tests.gpu.check import Figures, Goal, NotMeasured, Scale

NAME = "logprob"
AFTER: tuple[str, ...] = ()
PARTS = ("one", "variants")
DEADLINE_S = 150.0
GOALS = (
    Goal(figure="forward_over_read", what="forward ÷ reading the logits once", at_most=1.5),
    Goal(figure="backward_over_read_write", what="backward ÷ reading and writing them once"),
    Goal(figure="torch_over_read", what="the chunked torch path's forward ÷ reading the logits once"),
    Goal(figure="extra_share", what="peak extra memory, forward and backward ÷ the logits", at_most=0.05),
    Goal(figure="logprob_error", what="largest error of a log-probability against float64", unit="nats", at_most=2e-5),
    Goal(figure="entropy_error", what="largest error of an entropy against float64", unit="nats", at_most=1e-4),
    Goal(figure="gradient_error", what="gradient: ‖out − ref‖ / ‖ref‖ against float64, rounded to bf16", at_most=0.004),
    Goal(figure="forward_ms", what="forward", unit="ms"),
    Goal(figure="backward_ms", what="backward, in place", unit="ms"),
)
TEMPERATURE = 0.9
SAMPLED_ROWS = 64


def run(scale: Scale) -> Figures:
    return _variants(scale) if scale.part == "variants" else _one(scale)


def _variants(scale: Scale) -> Figures:
    """Which launch constants of the kernels are fastest here."""
    if scale.rehearsal:
        raise NotMeasured("needs a GPU to compare variants of kernels on")
    from tests.bench.kernels import Bench
    from tests.gpu.timing import kernel_table

    return {"variants (lanes/warps)": kernel_table(Bench().vocabulary())}


def _one(scale: Scale) -> Figures:
    import torch

    from megatron_bridge.model import logprobs
    from tests.gpu import timing

    tokens, vocabulary = scale.of((8192, 151_936), (64, 1000))
    torch.manual_seed(0)
    logits = (torch.randn(tokens, 1, vocabulary, device=scale.device) * 3.0).bfloat16()
    labels = torch.randint(0, vocabulary, (tokens, 1), device=scale.device)
    scale.keep(**accuracy(logits[:SAMPLED_ROWS].clone(), labels[:SAMPLED_ROWS]))
    bandwidth = timing.copy_bandwidth(scale.device, logits.nbytes)
    read_s = logits.nbytes / bandwidth
    forward_s = timing.seconds(lambda: score(logits, labels))
    scale.keep(forward_ms=forward_s * 1e3, forward_over_read=forward_s / read_s, copy_gb_s=bandwidth / 1e9)
    both_s = timing.seconds(lambda: score_and_return(logits, labels))
    backward_s = max(both_s - forward_s, 0.0)
    scale.keep(backward_ms=backward_s * 1e3, backward_over_read_write=backward_s / (2 * read_s))
    extra = timing.peak_extra_bytes(lambda: score_and_return(logits, labels))
    scale.keep(extra_share=extra / logits.nbytes)
    chunked_s = timing.seconds(lambda: logprobs.statistics(logits[:, 0], labels[:, 0], TEMPERATURE))
    return scale.keep(torch_over_read=chunked_s / read_s, torch_ms=chunked_s * 1e3)


def score(logits: Any, labels: Any) -> tuple[Any, Any]:
    """(log-probabilities, entropies)"""
    from megatron_bridge.model.logprobs import vocab_parallel_logprobs

    return vocab_parallel_logprobs(logits, labels, temperature=TEMPERATURE, group=None, overwrite_logits=True)


def score_and_return(logits: Any, labels: Any) -> None:
    """Forward and backward. The gradient takes the place of the logits; their values do not matter for the time."""
    import torch

    subject = logits.detach().requires_grad_()
    torch.autograd.grad(score(subject, labels)[0].sum(), subject)


def accuracy(logits: Any, labels: Any) -> Figures:
    """Errors of some rows, gradient included."""
    import torch

    from tests.gpu.timing import relative_error

    exact = logits.detach().double().requires_grad_()
    reference = torch.log_softmax(exact / TEMPERATURE, -1)
    picked = reference.gather(-1, labels[..., None])[..., 0]
    entropy = -(reference.exp() * reference).sum(-1)
    upstream = torch.linspace(-1.0, 1.0, picked.numel(), device=logits.device).reshape(picked.shape)
    picked.backward(upstream.double())
    subject = logits.detach().requires_grad_()
    logprobs, entropies = score(subject, labels)
    (gradient,) = torch.autograd.grad(logprobs, subject, upstream)
    assert exact.grad is not None
    return {
        "logprob_error": float((logprobs.detach().double() - picked.detach()).abs().max()),
        "entropy_error": float((entropies.detach().double() - entropy.detach()).abs().max()),
        "gradient_error": relative_error(gradient, exact.grad),
    }
