"""20 optimizer steps of a 1.7 B model (Qwen3's shape) in BF16 and in FP8: losses, gradients, step time, utilization;
and steps of four layers of a 32B (hidden 5120, ffn 25,600), whose products are larger and gain more by FP8.

Model FLOPs of a position in a row of s tokens (launch.plan.costs.forward_flops): 2 for each parameter that it is
multiplied by, LM head included and embedding not, and 2·L·q·s for causal attention (2·q·s of Q·Kᵀ and as much of P·V,
halved by the mask; q = heads × head size). Forward and backward are three times that; what is computed again does not
count. Here

    N = 28 · (2048·(2048 + 2·1024) + 2048·2048 + 3·2048·6144) + 151,936·2048 = 1.720e9,   s = 2048
    3 · (2·1.720e9 + 2·28·2048·2048) = 11.03 GFLOP a token, 361 TFLOP a step of 32,752 tokens

so that 60 % of 750 TFLOP/s is .80 s a step. The four layers have 1.99e9 with a head of 8,192: 405 TFLOP, .83 s at 65 %.
Utilization is by the BF16 rate that a matrix product reaches in the same process, and the whole of
`MegatronLearner.update` counts: planning, loss, gradient norm, optimizer, statistics.
Gradients are compared after the first step, which all precisions take from the same weights and batch, on the same
random sample of their elements.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from tests.gpu.check import Figures, Goal, Scale, ratios

NAME = "training"
AFTER = ("stack.imports", "te_linear")
PRECISIONS = ("bf16", "fp8_tensor", "fp8_block")
SIZES = {"1.7b": "", "32b-layers": "32b_"}
"""Model → what its parts' names begin with."""
PARTS = tuple(begin + precision for begin in SIZES.values() for precision in PRECISIONS)
DEADLINE_S = 120.0
STEPS, SHORT, TRUSTED_FROM = 20, 9, 5
"""Steps of 1.7 B, whose losses are compared, and of the four layers; the first whose seconds count: before, kernels are
compiled and memory is found."""
GRADIENT_SAMPLES = 1 << 16
"""Elements of each parameter's gradient that are compared."""
TOP_KERNELS = 15


def _goals() -> tuple[Goal, ...]:
    goals = []
    for begin, utilization, speed_up in (("", 0.60, 1.15), ("32b_", 0.65, 1.35)):
        plain, name = f"{begin}bf16", "four layers of a 32B" if begin else "1.7 B"
        goals.append(Goal(figure=f"{plain}_utilization", what=f"{name}: FLOP utilization, BF16", at_least=utilization))
        for precision in PRECISIONS[1:]:
            part = begin + precision
            goals += [
                Goal(figure=f"{part}_speed_up", what=f"{name}: step time BF16 ÷ {precision}", at_least=speed_up),
                Goal(figure=f"{part}_cosine", what=f"{part}: cosine of the gradients with BF16's", at_least=0.98),
                Goal(figure=f"{part}_lowest_cosine", what=f"{part}: lowest of a single parameter"),
            ]
            if not begin:
                what = f"{part}: |loss − BF16's|, last five steps"
                goals.append(Goal(figure=f"{part}_loss_gap", what=what, unit="nats", at_most=0.05))
        for part in (begin + precision for precision in PRECISIONS):
            goals += [
                Goal(figure=f"{part}_idle_share", what=f"{part}: share of a step without a kernel", at_most=0.08),
                Goal(figure=f"{part}_step_s", what=f"{part}: a step", unit="s"),
                Goal(figure=f"{part}_tokens_s", what=f"{part}: tokens a second"),
                Goal(figure=f"{part}_peak_gib", what=f"{part}: peak memory", unit="GiB"),
                Goal(figure=f"{part}_loss", what=f"{part}: loss", unit="nats"),
            ]
    return tuple(goals)


GOALS = _goals()


def run(scale: Scale) -> Figures:
    begin, precision = ("32b_", scale.part[4:]) if scale.part.startswith("32b_") else ("", scale.part)
    if precision != "bf16":
        scale.needs_transformer_engine()
    import torch

    from tests.gpu.learners import learner, supervised_batch
    from tests.gpu.models import shared_model
    from tests.gpu.timing import matmul_rate

    rows, length, budget = scale.of((16, 2048, 8192), (4, 33, 66))
    rate = matmul_rate(scale.device, scale.of(8192, 256), torch.bfloat16)
    model = shared_model(scale, next(size for size, start in SIZES.items() if start == begin))
    optimizer = dict(lr=scale.of(2e-4, 1e-3), warmup_steps=2)
    with learner(model, precision=precision, micro_batch_tokens=budget, optimizer=optimizer) as subject:
        vocabulary = subject.model_config.vocab_size
        count = SHORT if begin else STEPS
        batches = [supervised_batch(vocabulary, rows, length, seed) for seed in range(count)]
        for name, value in steps(scale, begin, subject, batches).items():
            scale.keep(**{f"{scale.part}_{name}": value})
        step_s = scale.read("figures")[f"{scale.part}_step_s"]
        assert isinstance(step_s, float)
        flops = model_flops(subject.model_config, rows * (length - 1), float(length))
        scale.keep(**{f"{scale.part}_utilization": flops / step_s / rate, "matmul_tflop_s": rate / 1e12})
        table, kernels_s = profile(subject, batches[0])
        idle: Any = "needs a GPU" if scale.rehearsal else max(0.0, 1.0 - kernels_s / step_s)
        return scale.keep(**{f"{scale.part} kernels of a step": table, f"{scale.part}_idle_share": idle})


def model_flops(shape: Any, tokens: int, row_tokens: float) -> float:
    """Forward and backward of so many positions; see the module's head."""
    from launch.plan.costs import forward_flops

    return 3.0 * tokens * forward_flops(shape, row_tokens)


def steps(scale: Scale, begin: str, subject: Any, batches: list[Any]) -> Figures:
    """loss (a curve), step_s, tokens_s, peak_gib; the first step's gradient sample stays in the check's folder."""
    import torch

    from tests.gpu.learners import train_step
    from tests.gpu.timing import wall_seconds

    losses: list[object] = []
    taken = []
    for number, batch in enumerate(batches):
        taken.append(wall_seconds(lambda batch=batch: losses.append(train_step(subject, batch)["loss"])))
        if number == 0:
            scale.keep(**compare_gradients(scale, begin, subject))
        print(f"step {number}: loss {losses[-1]:.4f}, {taken[-1]:.3f} s", flush=True)
    step_s = statistics.median(taken[TRUSTED_FROM:])
    tokens = sum(len(batches[0].sample_tokens(row)) - 1 for row in range(batches[0].num_samples))
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {"loss": losses, "step_s": step_s, "tokens_s": tokens / step_s, "peak_gib": peak}


def compare_gradients(scale: Scale, begin: str, subject: Any) -> Figures:
    """cosine and lowest_cosine with those of BF16, which leaves its own for the parts after it."""
    path, theirs = (scale.folder / f"gradients-{part}.safetensors" for part in (scale.part, f"{begin}bf16"))
    save_gradients(subject, path)
    names = (f"{scale.part}_cosine", f"{scale.part}_lowest_cosine")
    if not theirs.exists():
        return dict.fromkeys(names, "the BF16 part left no gradients: run both in one call")
    return dict(zip(names, cosines(theirs, path), strict=True))


def save_gradients(subject: Any, path: Path) -> None:
    """A random sample of each parameter's gradient, float32 by stage name. Clipping has scaled all of them alike."""
    import torch
    from safetensors.torch import save_file

    from megatron_bridge.weights import NameMap, parameter_names

    found = {}
    for name, parameter in parameter_names(subject.model, NameMap(subject.model_config)):
        gradient = parameter.main_grad.detach().reshape(-1)
        draw = torch.Generator().manual_seed(0)
        chosen = torch.randint(0, len(gradient), (min(GRADIENT_SAMPLES, len(gradient)),), generator=draw)
        # Small parameters get few elements and large ones many; the weight makes the whole cosine that of all.
        found[name] = gradient[chosen.to(gradient.device)].float().cpu() * (len(gradient) / len(chosen)) ** 0.5
    save_file(found, path)


def cosines(one: Path, other: Path) -> tuple[float, float]:
    """(over all parameters together, lowest of a single one)"""
    from safetensors.torch import load_file

    left, right = load_file(one), load_file(other)
    inner = {name: float(left[name].double() @ right[name].double()) for name in left}
    norms = {name: (float(left[name].double().norm()), float(right[name].double().norm())) for name in left}
    whole = sum(inner.values()) / (sum(a * a for a, _ in norms.values()) * sum(b * b for _, b in norms.values())) ** 0.5
    return whole, min(inner[name] / (a * b) for name, (a, b) in norms.items() if a * b > 0.0)


def profile(subject: Any, batch: Any) -> tuple[list[object], float]:
    """The kernels that take most of one step: head, then [name, calls, ms, share of all kernels' time]; and seconds of
    all, which follow one another on one GPU."""
    import torch
    from torch.profiler import ProfilerActivity

    from tests.gpu.learners import train_step

    on_gpu = torch.cuda.is_available()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        train_step(subject, batch)
    spent = [
        (event.key, event.count, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3)
        for event in profiler.key_averages()
    ]
    total = sum(ms for *_, ms in spent) or 1.0
    top = sorted(spent, key=lambda row: -row[2])[:TOP_KERNELS]
    rows: list[object] = [["kernel", "calls", "ms", "share"]]
    return rows + [[key[:80], calls, round(ms, 3), round(ms / total, 4)] for key, calls, ms in top], total / 1e3


def derive(figures: Figures) -> Figures:
    pairs = [(f"{begin}bf16", f"{begin}{precision}") for begin in SIZES.values() for precision in PRECISIONS[1:]]
    found = ratios(figures, {f"{part}_speed_up": (f"{plain}_step_s", f"{part}_step_s") for plain, part in pairs})
    for plain, part in pairs:
        ours, theirs = figures.get(f"{plain}_loss"), figures.get(f"{part}_loss")
        if isinstance(ours, list) and isinstance(theirs, list):
            last = zip(ours[-5:], theirs[-5:], strict=True)
            found[f"{part}_loss_gap"] = statistics.fmean(abs(float(str(a)) - float(str(b))) for a, b in last)
    return found
