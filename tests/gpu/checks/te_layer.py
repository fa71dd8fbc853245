"""One whole decoder layer as the learner builds it, against the same weights in float64 on Megatron's own layers.

Compared are what the layer adds to the residual stream, and the gradient of a cross-entropy in each of its parameters.
With the ε of te_linear, an FP8 product of e4m3 operands is off by 0.035. What the layer adds has passed two such
products in the attention (0.049) and two in the MLP, of which the first counts twice, once for each factor of SwiGLU
(0.060). A gradient passes up to four products on its way back, each off by at most 0.055 (e5m2), on top of the
activations' own error: √(4·0.055² + 0.06²) = 0.125. Bounds are 1.5 times that. A bfloat16 rounding costs 0.0015; there
are some ten.

How a tensor is scaled hardly matters to a format with an exponent, so one bound holds for all of FP8: in float64, with
casts emulated, this layer is off by 0.0714 and 0.090 with scales of its own tensors, and by 0.0714 and 0.091 with
those of three passes before. But the first pass of delayed scaling has scales of 1, at which weights of 0.02 are among
e4m3's subnormals and off by 0.033; and TE keeps the weights that it cast for the first micro-batch of a step. If those
of the first pass stay, 0.0938 and 0.111: what an H200 measured before every pass here said that it is the first.
"""

from __future__ import annotations

from typing import Any

from tests.gpu.check import Figures, Goal, Scale

NAME = "te_layer"
AFTER = ("stack.imports", "te_linear")
PARTS = ("bf16", "fp8_tensor", "fp8_block", "fp8_delayed")
DEADLINE_S = 150.0
BOUNDS = {"bf16": (0.01, 0.02), "fp8": (0.09, 0.19)}
"""Of the layer's output and of its worst gradient."""


def _goals() -> tuple[Goal, ...]:
    goals = []
    for part in PARTS:
        out, gradient = BOUNDS[part[:3] if part != "bf16" else part]
        goals += [
            Goal(figure=f"{part}_out", what=f"{part}: error of what the layer adds", at_most=out),
            Goal(figure=f"{part}_gradient", what=f"{part}: largest error of a gradient", at_most=gradient),
            Goal(figure=f"{part}_worst", what=f"{part}: whose gradient that is"),
        ]
    return tuple(goals)


GOALS = _goals()


def run(scale: Scale) -> Figures:
    if scale.part != "bf16":
        scale.needs_transformer_engine()
    from launch.convert.new_model import new_model
    from tests.gpu.learners import learner

    sizes = scale.of(
        dict(hidden=2048, heads=16, kv_heads=8, head_dim=128, ffn=6144),
        dict(hidden=128, heads=4, kv_heads=2, head_dim=64, ffn=384),
    )
    model = scale.folder / "one-layer"
    if not model.exists():
        new_model(model, layers=1, **sizes, dtype="bfloat16")
    rows, length = scale.of((4, 513), (4, 33))
    with learner(model, precision=scale.part, micro_batch_tokens=rows * length, overlap_grad_reduce=False) as subject:
        found = compare(subject, rows, length)
    return {f"{scale.part}_{name}": value for name, value in found.items()}


def compare(subject: Any, rows: int, length: int) -> Figures:
    """out and gradient: ‖found − reference‖ / ‖reference‖; worst: the tensor of the largest gradient error."""
    import torch

    from megatron_bridge.model.build import build_chunks
    from megatron_bridge.model.te_precision import warm_up_passes
    from megatron_bridge.weights import load_hf
    from tests.gpu.learners import one_micro_batch
    from tests.gpu.timing import relative_error

    micro_batch = one_micro_batch(subject, rows, length)
    (chunk,) = subject.model
    for _ in range(1 + warm_up_passes("fp8_delayed")):  # its scales come from the passes before
        chunk.zero_grad_buffer()
        out, gradients = layer_pass(subject, chunk, micro_batch)
    (reference,) = build_chunks(subject.model_config, subject.layout, torch.float64, 1.0, layers="megatron")
    load_hf([reference], subject.model_config, subject.model_folder)
    expected, wanted = layer_pass(subject, reference, micro_batch)
    errors = {name: relative_error(gradients[name], wanted[name]) for name in wanted}
    worst = max(errors, key=lambda name: errors[name])
    return {"out": relative_error(out, expected), "gradient": errors[worst], "worst": worst}


def layer_pass(subject: Any, chunk: Any, micro_batch: Any) -> tuple[Any, dict[str, Any]]:
    """What layer 0 of a chunk adds to its input, and the gradients of its parameters by the first Hugging Face tensor
    that each holds: TE names a norm after the linear layer that it is fused with, Megatron's own layers do not."""
    from megatron_bridge.step.passes import packed_rows
    from megatron_bridge.weights import NameMap, ShardCoords, parameter_names

    inner = getattr(chunk, "module", chunk)
    seen: list[Any] = []

    def keep(_: Any, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        before = named["hidden_states"] if "hidden_states" in named else arguments[0]
        after = output[0] if isinstance(output, tuple) else output
        seen.append((after.detach().double() - before.detach().double()).clone())

    inner.set_is_first_microbatch()  # as a step does: TE casts the weights again
    hook = inner.decoder.layers[0].register_forward_hook(keep, with_kwargs=True)
    here = micro_batch.to(subject.device)
    scores = chunk(
        *(here.tokens, None, None),
        labels=here.labels,
        packed_seq_params=packed_rows(micro_batch, here, inner.config),
    )
    (-scores.logprobs[0, here.columns].mean()).backward()
    hook.remove()
    names = NameMap(subject.model_config)
    gradients = {
        names.slices(name, ShardCoords())[0].name: (parameter.main_grad if parameter.grad is None else parameter.grad)
        .detach()
        .clone()
        for name, parameter in parameter_names([chunk], names)
        if ".layers." in name
    }
    return seen[0], gradients
