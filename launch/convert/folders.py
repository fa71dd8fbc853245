"""Convert model folders between Hugging Face, Megatron and FP8, and compare the output with the source.

    check the source's headers ──▶ write OUT.tmp-PID ──▶ read it back, compare ──▶ rename to OUT

A conversion that finds any difference raises, and leaves no OUT behind. With --verify, both sides compute
log-probabilities of the same random token rows, in float32, with the model loaded whole:

    HF ⇄ Megatron  transformers on the HF folder | the learner on the checkpoint: at most 1e-3 nats apart
    FP8            transformers on the dequantized folder, activations quantized as the engine does | the learner on
                   the source, emulating the formats: a mean gap of at most 10 % of the plain learner's

The FP8 gap is a mean, since an activation between two e4m3 values may round either way.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from launch.run.processes import child_environment, run_child, run_ranks, torchrun
from launch.terminal import counted
from megatron_bridge.hf.folders import check_free, complete_folder, describe_folder, new_folder
from megatron_bridge.hf.headers import DTYPES, check_weights, tensor_headers
from megatron_bridge.hf.model_config import ModelConfig, read_config, read_hf_config
from megatron_bridge.parallel.layout import Layout, check_layout, initialize
from pipeline.child_process import die_with_parent
from pipeline.config.recipe import LearnerSection, layout_name
from pipeline.data.checksums import verify_folder
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import CorruptCheckpointError, LayoutError, ModelError, NonFiniteError
from pipeline.trainer.checkpoints import COMMIT, commit, verify

if TYPE_CHECKING:
    from precision.formats.quant_map import QuantMap

Number = Literal["bf16", "fp32", "keep"]
Fp8Layout = Literal["block128", "tensor"]

SAFETENSORS_DTYPES = {"bf16": "BF16", "fp32": "F32"}
SLOWEST_BYTES_S = 5e6
"""Lowest rate of ranks that are not hung, after ten minutes of grace."""
NUM_ROWS, ROW_TOKENS = 4, 48
LARGEST_GAP_NATS = 1e-3
"""A misplaced tensor costs tenths of a nat; another summation order in float32 about 1e-5."""
OPEN_SHARE = 0.1

Scores = list[NDArray[np.float32]]


def hf_to_megatron(
    source: Path, out: Path, *, tensor: int, pipeline: int, expert: int, dtype: Number, verify_logprobs: bool
) -> dict[str, Any]:
    """Write an HF folder as a weights-only checkpoint. Raises ModelError, LayoutError, CorruptCheckpointError."""
    from megatron_bridge.checkpoint.dcp import CheckpointIndex

    started = time.monotonic()
    check_free(out)
    hf_config, config, ignored = checked_source(source)
    section = learner_section(config, hf_config, tensor, pipeline, expert)
    kind = chosen_dtype(source, dtype)
    total = config.num_parameters * (2 if kind == "BF16" else 4)
    with new_folder(out) as folder:
        place = dict(source=str(source.resolve()), out=str(folder.resolve()))
        job = dict(kind="write", dtype=kind, learner=section.model_dump(), **place)
        with bar("write", total) as advance:
            written = 0

            def watch() -> None:
                nonlocal written
                size = sum(path.stat().st_size for path in folder.glob("*.distcp"))
                advance(size - written)
                written = size

            run_job("launch.convert.folders", job, section.num_processes, total, watch)
        describe_folder(folder, source, hf_config, DTYPES[kind])
        with bar("compare", total) as advance:
            compare_with_source(CheckpointIndex(folder), config, source, advance)
        commit(folder, 0)
    result = dict(
        out=str(out),
        format="megatron",
        written_by=layout_name(section),
        dtype=kind,
        **_counts(config, total, ignored, started),
    )
    if verify_logprobs:
        result["verify"] = verify_megatron(source, out)
    return result


def megatron_to_hf(checkpoint: Path, out: Path, *, verify_logprobs: bool) -> dict[str, Any]:
    """Write a checkpoint of `hf_to_megatron`, or of a run, as an HF folder, tensor by tensor."""
    from megatron_bridge.checkpoint.dcp import CheckpointIndex, stored_dtype, stream_hf_tensors
    from megatron_bridge.hf.tensor_files import check_written, whole_tensors, write_shards

    started = time.monotonic()
    check_free(out)
    described = description_of(checkpoint)
    hf_config = read_config(described)
    config = ModelConfig.from_hf(hf_config)
    check_committed(checkpoint)
    index = CheckpointIndex(checkpoint)
    dtype = stored_dtype(index)
    total = config.num_parameters * dtype.itemsize
    with new_folder(out) as folder:
        with bar("write", total) as advance:
            manifest = write_shards(whole_tensors(stream_hf_tensors(index, config)), folder, advance=advance)
        complete_folder(folder, described, hf_config, manifest)
        with bar("compare", total) as advance:
            check_written(folder, manifest, advance)
        require_same_names(set(config.tensors()), set(manifest))
    result = dict(out=str(out), format="hf", dtype=str(dtype), **_counts(config, total, [], started))
    if verify_logprobs:
        result["verify"] = verify_megatron(out, checkpoint)
    return result


def hf_to_fp8(source: Path, out: Path, layout: Fp8Layout, *, verify_logprobs: bool) -> dict[str, Any]:
    """Write an HF folder as an FP8 one for stock SGLang, in bounded memory. Raises ModelError, NonFiniteError."""
    from megatron_bridge.hf.fp8 import output_bytes, write_fp8_folder
    from megatron_bridge.hf.tensor_files import check_written

    started = time.monotonic()
    check_free(out)
    hf_config, config, ignored = checked_source(source)
    quant = fp8_map(hf_config, config, layout)
    total = output_bytes(source, quant)
    with new_folder(out) as folder:
        with bar("quantize", total) as advance:
            try:
                manifest = write_fp8_folder(source, folder, quant, advance=advance)
            except FloatingPointError as error:
                raise NonFiniteError(f"{source}: {error}") from error
        with bar("compare", total) as advance:
            check_written(folder, manifest, advance)
    result = dict(
        out=str(out),
        format=f"fp8 {layout}",
        quantized_tensors=len(quant.formats),
        **_counts(config, total, ignored, started),
    )
    if verify_logprobs:
        result["verify"] = verify_fp8(source, out, layout)
    return result


def checked_source(source: Path) -> tuple[dict[str, Any], ModelConfig, list[str]]:
    """Check an HF folder's headers; return (config.json, ModelConfig, names of unused tensors). Raises ModelError
    naming every missing, misshapen or unknown tensor, and for a tied model with another LM head than its embedding."""
    from megatron_bridge.hf.tensor_files import TensorFolder

    hf_config = read_hf_config(source)
    config = ModelConfig.from_hf(hf_config)
    check_weights(source, config)
    verify_folder(source, "fetch or convert it again", required=False)
    ignored = sorted(set(tensor_headers(source)) - set(config.tensors()))
    if "lm_head.weight" in ignored:
        tensors = TensorFolder(source)
        if tensors.digest("lm_head.weight") != tensors.digest("model.embed_tokens.weight"):
            raise ModelError(
                f"{source}: tie_word_embeddings is true, but lm_head.weight is not model.embed_tokens.weight; "
                "set it to false in config.json, or remove lm_head.weight"
            )
    return hf_config, config, ignored


def chosen_dtype(source: Path, dtype: Number) -> str:
    """Return BF16 or F32. Raises ModelError for `keep` when the source has another dtype or several."""
    if dtype != "keep":
        return SAFETENSORS_DTYPES[dtype]
    kinds = {header.dtype for header in tensor_headers(source).values()}
    if len(kinds) != 1 or not kinds <= set(SAFETENSORS_DTYPES.values()):
        raise ModelError(
            f"{source} holds {', '.join(sorted(kinds))}, and --dtype keep needs BF16 or F32 throughout; "
            "choose --dtype bf16 or --dtype fp32"
        )
    return kinds.pop()


def fp8_map(hf_config: dict[str, Any], config: ModelConfig, layout: Fp8Layout) -> QuantMap:
    """Return the map of the quantized weights. Raises ModelError for widths that blocks do not divide."""
    from precision.formats.quant_map import QuantMap
    from rollout_sglang.server.capacity import check_block_shapes

    experts = config.experts
    if layout == "block128":
        check_block_shapes(hf_config)
    rollout_format = "fp8_block" if layout == "block128" else "fp8_tensor"
    return QuantMap.for_decoder(config.num_layers, rollout_format, None if experts is None else experts.count)


def description_of(checkpoint: Path) -> Path:
    """Return the folder with a checkpoint's config.json and tokenizer: itself, or its run's first model."""
    if not checkpoint.is_dir():
        raise CorruptCheckpointError(
            f"{checkpoint} is not a folder; name one, for example runs/demo/checkpoints/000012"
        )
    if (checkpoint / "config.json").exists():
        return checkpoint
    run = RunDirectory(checkpoint.resolve().parent.parent)
    if not (run.path / "recipe.yaml").exists():
        raise CorruptCheckpointError(
            f"{checkpoint} has no config.json and lies in no run; name runs/NAME/checkpoints/STEP, or a folder that "
            "`evenkeel convert hf-to-megatron` wrote"
        )
    return run.recipe().model.path


def check_committed(checkpoint: Path) -> None:
    """Raise CorruptCheckpointError unless every file matches COMMIT."""
    if not (checkpoint / COMMIT).exists():
        raise CorruptCheckpointError(f"{checkpoint} has no {COMMIT}: it was never completed; use another checkpoint")
    verify(checkpoint)


def learner_section(
    config: ModelConfig, hf_config: dict[str, Any], tensor: int, pipeline: int, expert: int
) -> LearnerSection:
    """Return the smallest layout with these sizes. Raises LayoutError."""
    section = LearnerSection(
        precision="fp32",
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        expert_parallel=expert,
        data_parallel=expert // math.gcd(expert, tensor),
        sequence_parallel=config.experts is not None and tensor > 1,
    )
    try:
        check_layout(hf_config, section)
    except LayoutError as error:
        message = str(error)
        for size in ("tensor", "pipeline", "expert"):
            message = message.replace(f"learner.{size}_parallel", f"--{size}-parallel")
        raise LayoutError(message) from None
    assert Layout.of(section).num_processes == section.num_processes
    return section


def compare_with_source(index: Any, config: ModelConfig, source: Path, advance: Callable[[int], None]) -> None:
    """Compare every HF tensor of a written checkpoint, bit by bit, with the source in the checkpoint's dtype."""
    import torch

    from megatron_bridge.checkpoint.dcp import stream_hf_tensors
    from megatron_bridge.hf.tensor_files import TensorFolder

    wanted = TensorFolder(source)
    seen = set()
    for name, tensor in stream_hf_tensors(index, config):
        original = wanted.whole(name).to(tensor.dtype)
        if not torch.equal(*(one.contiguous().flatten().view(torch.uint8) for one in (original, tensor))):
            raise ModelError(f"{name} came out with other values than {source} holds; this is a bug, report the model")
        seen.add(name)
        advance(tensor.nbytes)
    require_same_names(set(config.tensors()), seen)


def require_same_names(expected: set[str], found: set[str]) -> None:
    if expected != found:
        raise ModelError(f"missing {sorted(expected - found)[:5]}, left over {sorted(found - expected)[:5]}")


def run_job(
    module: str,
    job: dict[str, Any],
    num_processes: int | None,
    num_bytes: int,
    watch: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run `module` on a job in ranks, or in one plain process for None; return its result.json."""

    with tempfile.TemporaryDirectory(prefix="evenkeel-convert-") as scratch:
        run = RunDirectory(Path(scratch))
        run.logs.mkdir()
        (run.path / "job.json").write_text(json.dumps(job), encoding="utf-8")
        ranks = [sys.executable, "-P", "-m", module, scratch]
        command = ranks if num_processes is None else torchrun(num_processes, module, scratch)
        deadline = 600.0 + num_bytes / SLOWEST_BYTES_S
        log = run.logs / "conversion.log"
        run_ranks(run, command, log=log, env=child_environment(), watch=watch, deadline_s=deadline)
        path = run.path / "result.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@contextmanager
def bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of `total` bytes in percent; yield a function that adds bytes."""
    advanced = 0
    with counted(f"{name}, percent:", 100) as show:

        def advance(count: int) -> None:
            nonlocal advanced
            advanced += count
            show(100 * advanced // max(total, 1))

        yield advance


def _counts(config: ModelConfig, num_bytes: int, ignored: list[str], started: float) -> dict[str, Any]:
    return dict(
        architecture=config.architecture,
        tensors=len(config.tensors()),
        parameters=config.num_parameters,
        bytes=num_bytes,
        left_over=ignored,
        wall_s=round(time.monotonic() - started, 1),
    )


def verify_megatron(hf: Path, checkpoint: Path) -> dict[str, Any]:
    """Compare an HF folder with a checkpoint of the same weights. Raises ModelError when they differ."""
    gaps = _gaps_of(dict(kind="megatron", hf=str(hf.resolve()), checkpoint=str(checkpoint.resolve())))
    if gaps["max_gap_nats"] > LARGEST_GAP_NATS:
        raise ModelError(
            f"log-probabilities of {hf} and {checkpoint} differ by up to {gaps['max_gap_nats']:.3g} nats, expected at "
            f"most {LARGEST_GAP_NATS:g}; do not use the result"
        )
    return {**gaps, "allowed_nats": LARGEST_GAP_NATS}


def verify_fp8(source: Path, folder: Path, layout: str) -> dict[str, Any]:
    """Compare an FP8 folder with the learner that emulates its formats. Raises ModelError when they differ."""
    if ModelConfig.from_hf(read_config(source)).experts is not None:
        raise ModelError("--verify of an FP8 folder knows dense models only; the folder was written and compared")
    gaps = _gaps_of(dict(kind="fp8", hf=str(source.resolve()), folder=str(folder.resolve()), layout=layout))
    if gaps["mean_gap_emulated_nats"] > OPEN_SHARE * gaps["mean_gap_plain_nats"]:
        raise ModelError(
            f"the learner's emulation of {folder} is off by {gaps['mean_gap_emulated_nats']:.3g} nats in the mean, "
            f"expected at most {OPEN_SHARE:.0%} of the unquantized learner's {gaps['mean_gap_plain_nats']:.3g}; "
            "do not use the result"
        )
    return {**gaps, "allowed_share": OPEN_SHARE}


def _gaps_of(job: dict[str, Any]) -> dict[str, Any]:
    num_bytes = 4 * sum(math.prod(header.shape) for header in tensor_headers(Path(job["hf"])).values())
    return run_job("launch.convert.folders", job, 1, num_bytes)


def transformers_scores(folder: Path, quant: Any, rows: Sequence[Sequence[int]]) -> Scores:
    """Compute [n - 1] log-probabilities of each row of n tokens; with a quant map, for a stored FP8 folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from megatron_bridge.hf.fp8 import dequantized_tensors
    from precision.formats.formats import fake_quantize

    if quant is None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        hf_config = AutoConfig.from_pretrained(folder)
        del hf_config.quantization_config
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
        left = model.load_state_dict(dict(dequantized_tensors(folder, torch.float32)), strict=False)
        if left.unexpected_keys or set(left.missing_keys) - {"lm_head.weight"}:
            raise ModelError(f"{folder} does not fill the model of its config.json: {left}")
        model.tie_weights()

        def quantize_input(kind: Any, _: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return fake_quantize(inputs[0], kind, per_token=True), *inputs[1:]

        for module, rollout_format in quant.formats.items():
            model.get_submodule(module).register_forward_pre_hook(partial(quantize_input, rollout_format))
    model.eval()
    scores = []
    with torch.no_grad():
        for row in rows:
            tokens = torch.tensor([list(row)])
            logprobs = torch.log_softmax(model(tokens).logits[0, :-1].float(), -1)
            scores.append(logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy())
    return scores


def _gaps(ours: Scores, theirs: Scores) -> NDArray[np.float64]:
    pairs = zip(ours, theirs, strict=True)
    gaps = np.concatenate([np.abs(np.asarray(a, np.float64) - b) for a, b in pairs])
    if not np.isfinite(gaps).all():
        raise ModelError("log-probabilities are not finite: the weights are damaged; do not use the result")
    return gaps


def write_share(job: dict[str, Any]) -> None:
    import torch

    from megatron_bridge.checkpoint.training_state import save_weights
    from megatron_bridge.model.build import build_chunks
    from megatron_bridge.weights import load_hf

    section = LearnerSection.model_validate(job["learner"])
    layout, source = Layout.of(section), Path(job["source"])
    initialize(layout, 0, section.step_deadline_s)
    config = ModelConfig.from_hf(read_hf_config(source))
    chunks = build_chunks(config, layout, getattr(torch, DTYPES[job["dtype"]]), 1.0)
    load_hf(chunks, config, source)
    save_weights(Path(job["out"]), chunks)


def score_both(job: dict[str, Any]) -> dict[str, Any]:
    """Score the same random rows by the learner and by transformers; return their gaps."""
    import torch

    from megatron_bridge.checkpoint.training_state import load_weights
    from megatron_bridge.learner import MegatronLearner
    from megatron_bridge.step.fp8_emulation import emulated
    from precision.supervised import Supervised

    hf = Path(job["hf"])
    hf_config, generator = read_config(hf), random.Random(0)
    length = min(ROW_TOKENS, int(hf_config["max_position_embeddings"]))
    rows = [[generator.randrange(hf_config["vocab_size"]) for _ in range(length)] for _ in range(NUM_ROWS)]
    section = LearnerSection(precision="fp32")
    learner = MegatronLearner.create(hf, section, Supervised(), temperature=1.0, seed=0, total_steps=1)
    if job["kind"] == "megatron":
        chunks = [chunk.module for chunk in learner.model]
        with torch.no_grad():
            for parameter in (p for chunk in chunks for p in chunk.parameters()):
                parameter.fill_(float("nan"))  # so that a parameter missing in the checkpoint is noticed
        load_weights(Path(job["checkpoint"]), chunks)
        gaps = _gaps(learner.score_tokens(rows), transformers_scores(hf, None, rows))
        return dict(max_gap_nats=float(gaps.max()), tokens=len(gaps))
    quant = fp8_map(hf_config, learner.model_config, job["layout"])
    plain = learner.score_tokens(rows)
    with emulated(learner, quant):
        ours = learner.score_tokens(rows)
    theirs = transformers_scores(Path(job["folder"]), quant, rows)
    gaps = _gaps(ours, theirs)
    return dict(
        mean_gap_emulated_nats=float(gaps.mean()),
        max_gap_emulated_nats=float(gaps.max()),
        mean_gap_plain_nats=float(_gaps(plain, theirs).mean()),
        tokens=len(gaps),
    )


def do_job(run: RunDirectory) -> None:
    """Do the job of job.json in one rank: write a share of a checkpoint, or compare scores into result.json."""
    job = json.loads((run.path / "job.json").read_text(encoding="utf-8"))
    if job["kind"] == "write":
        write_share(job)
    else:
        (run.path / "result.json").write_text(json.dumps(score_both(job)), encoding="utf-8")


if __name__ == "__main__":
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "conversion", lambda: do_job(directory))
