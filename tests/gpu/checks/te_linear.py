"""One Transformer Engine linear layer in FP8 against float64: does the library load and compute what it should?

Rounding to a format with m mantissa bits is off by u = step / √12, root mean square, where the step is 2^-m of the
power of two below a value. With values spread evenly over a binade in the logarithm their root mean square is
√(3 / (2·ln 2)) = 1.471 of that power of two, so that quantizing a tensor costs, relative to its norm,

    ε(m) = 2^-m / √12 / 1.471        e4m3: ε(3) = 0.0245        e5m2: ε(2) = 0.0491

Roundings are independent, so a product of two quantized operands is off by √(ε_a² + ε_b²): 0.0347 for e4m3 × e4m3,
0.0549 for a gradient in e5m2. Bounds leave a fifth on top for values that fall below a format's normal range and for
scales that are powers of two. Below half of the expectation nothing was quantized, which misses as well.
Per-tensor and delayed scaling keep gradients in e5m2 (hybrid); 128×128 blocks keep all in e4m3.
"""

from __future__ import annotations

import math
from typing import Any

from tests.gpu.check import Figures, Goal, Scale

NAME = "te_linear"
AFTER: tuple[str, ...] = ()
PARTS = ("bf16", "fp8_tensor", "fp8_block", "fp8_delayed")
DEADLINE_S = 150.0
MARGIN = 1.2
MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}


def rounding_error(fmt: str) -> float:
    """ε of the module's head."""
    return 2.0 ** -MANTISSA_BITS[fmt] / math.sqrt(12.0) / math.sqrt(1.5 / math.log(2.0))


def product_error(left: str, right: str) -> float:
    """Expected relative error of a product of independently rounded operands."""
    return math.hypot(rounding_error(left), rounding_error(right))


def gradient_format(precision: str) -> str:
    """Of gradients that are multiplied, under learner.precision."""
    return "e4m3" if precision == "fp8_block" else "e5m2"


def _goals() -> tuple[Goal, ...]:
    goals = [
        Goal(figure=f"bf16_{what}", what=f"bf16 {what}: ‖out − ref‖ / ‖ref‖", at_most=0.01)
        for what in ("forward", "dgrad", "wgrad")
    ]
    for precision in PARTS[1:]:
        gradient = gradient_format(precision)
        for what, expected in (
            ("forward", product_error("e4m3", "e4m3")),
            ("dgrad", product_error(gradient, "e4m3")),
            ("wgrad", product_error(gradient, "e4m3")),
        ):
            bounds = dict(at_least=round(expected / 2, 4), at_most=round(MARGIN * expected, 4))
            goals.append(Goal(figure=f"{precision}_{what}", what=f"{precision} {what}: ‖out − ref‖ / ‖ref‖", **bounds))
    return tuple(goals)


GOALS = _goals()


def run(scale: Scale) -> Figures:
    """Three passes, of which the last counts: delayed scaling takes its scales from passes before."""
    scale.needs_transformer_engine()
    import torch
    import transformer_engine.pytorch as te

    tokens, inputs, outputs = 8192, 4096, 6144
    linear = te.Linear(inputs, outputs, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x, weight, gradient = operands(tokens, inputs, outputs, "cuda")
    with torch.no_grad():
        linear.weight.copy_(weight)
    recipe = recipe_of(scale.part)
    for _ in range(3):
        x.grad = linear.weight.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = linear(x)
        out.backward(gradient)
    found = dict(forward=out, dgrad=x.grad, wgrad=linear.weight.grad)
    return {f"{scale.part}_{name}": value for name, value in errors(found, x, linear.weight, gradient).items()}


def operands(tokens: int, inputs: int, outputs: int, device: str) -> tuple[Any, Any, Any]:
    """bfloat16 input [tokens, inputs], weight [outputs, inputs] and gradient [tokens, outputs] of the usual sizes."""
    import torch

    torch.manual_seed(0)
    x = torch.randn(tokens, inputs, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).bfloat16()
    gradient = (torch.randn(tokens, outputs, device=device) * 1e-3).bfloat16()
    return x, weight, gradient


def errors(found: dict[str, Any], x: Any, weight: Any, gradient: Any) -> dict[str, float]:
    """forward, dgrad and wgrad against float64 products of the same operands."""
    from tests.gpu.timing import relative_error

    x64, w64, g64 = (tensor.detach().double() for tensor in (x, weight, gradient))
    reference = dict(forward=x64 @ w64.t(), dgrad=g64 @ w64, wgrad=g64.t() @ x64)
    return {name: relative_error(found[name], reference[name]) for name in reference}


def recipe_of(precision: str) -> Any:
    """TE's recipe for learner.precision, by way of the learner's own arguments for Megatron-Core; None for bf16."""
    if precision == "bf16":
        return None
    from megatron.core.fp8_utils import get_fp8_recipe
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_bridge.model.te_precision import fp8_arguments

    sizes = dict(num_layers=1, hidden_size=4096, num_attention_heads=32)
    return get_fp8_recipe(TransformerConfig(**sizes, bf16=True, **fp8_arguments(precision)))
