"""Convert model folders between Hugging Face, Megatron and FP8, and compare what was written with the source.

    check the source's headers ──▶ write OUT.tmp-PID ──▶ read it back, compare ──▶ rename to OUT

A conversion that finds any difference between what it read and what lies on disk raises, and leaves no OUT behind. With
--verify both sides compute log-probabilities of the same random token rows, in float32:

    HF ⇄ Megatron  transformers on the HF folder | the learner on the checkpoint: at most 1e-3 nats apart
    FP8            transformers on the dequantized folder, activations quantized as the engine does | the learner on
                   the source, emulating the formats: a mean gap of at most 10 % of the plain learner's

An activation on the border of two e4m3 values may fall either way, hence the mean for FP8. Loads the model whole.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

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
"""Ranks that are slower than this, after ten minutes of grace, have hung."""
NUM_ROWS, ROW_TOKENS = 4, 48
LARGEST_GAP_NATS = 1e-3
"""A tensor in the wrong place costs tenths of a nat; float32 in another order about 1e-5."""
OPEN_SHARE = 0.1

Scores = list[NDArray[np.float32]]


def hf_to_megatron(
    source: Path, out: Path, *, tensor: int, pipeline: int, expert: int, dtype: Number, verify_logprobs: bool
) -> dict[str, Any]:
    """HF folder → weights-only distributed checkpoint. Raises ModelError, LayoutError, CorruptCheckpointError."""
    from megatron_bridge.checkpoint.dcp import CheckpointIndex

    started = time.monotonic()
    check_free(out)
    hf_config, config, ignored = checked_source(source)
    section = learner_section(config, hf_config, tensor, pipeline, expert)
    kind = chosen_dtype(source, dtype)
    total = config.num_parameters * (2 if kind == "BF16" else 4)
    with new_folder(out) as folder, bars() as bar:
        place = dict(source=str(source.resolve()), out=str(folder.resolve()))
        job = dict(kind="write", dtype=kind, learner=section.model_dump(), **place)
        with bar("write", total) as advance:
            run_job("launch.convert.folders", job, section.num_processes, total, watching(folder, advance))
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
    """Checkpoint of `hf_to_megatron`, or of a run, → HF folder, one tensor after another."""
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
    with new_folder(out) as folder, bars() as bar:
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
    """HF folder → FP8 HF folder for stock SGLang, in bounded memory. Raises ModelError, NonFiniteError."""
    from megatron_bridge.hf.fp8 import output_bytes, write_fp8_folder
    from megatron_bridge.hf.tensor_files import check_written

    started = time.monotonic()
    check_free(out)
    hf_config, config, ignored = checked_source(source)
    quant = fp8_map(hf_config, config, layout)
    total = output_bytes(source, quant)
    with new_folder(out) as folder, bars() as bar:
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
    """(config.json, ModelConfig, names that are not carried over) of an HF folder whose headers are as they should be.

    Raises ModelError naming every tensor that is missing, misshapen or not part of the architecture.
    """
    hf_config = read_hf_config(source)
    config = ModelConfig.from_hf(hf_config)
    check_weights(source, config)
    verify_folder(source, "fetch or convert it again", required=False)
    ignored = sorted(set(tensor_headers(source)) - set(config.tensors()))
    if "lm_head.weight" in ignored:
        _require_tied(source)
    return hf_config, config, ignored


def _require_tied(source: Path) -> None:
    """An LM head that a tied model stores as well may be left out only if it is the embedding."""
    from megatron_bridge.hf.tensor_files import TensorFolder

    folder = TensorFolder(source)
    if folder.digest("lm_head.weight") != folder.digest("model.embed_tokens.weight"):
        raise ModelError(
            f"{source}: tie_word_embeddings is true, but lm_head.weight is not model.embed_tokens.weight; "
            "set it to false in config.json, or remove lm_head.weight"
        )


def chosen_dtype(source: Path, dtype: Number) -> str:
    """BF16 or F32. Raises ModelError when `keep` has nothing to keep."""
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
    """Which weights are quantized. Raises ModelError for widths that blocks cannot cut."""
    from precision.formats.quant_map import QuantMap
    from rollout_sglang.server.capacity import check_block_shapes

    experts = config.experts
    if layout == "block128":
        check_block_shapes(hf_config)
    rollout_format = "fp8_block" if layout == "block128" else "fp8_tensor"
    return QuantMap.for_decoder(config.num_layers, rollout_format, None if experts is None else experts.count)


def description_of(checkpoint: Path) -> Path:
    """The folder with config.json and tokenizer of a checkpoint: itself, or the model that its run started from."""
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
    """Raise CorruptCheckpointError unless every file is as its COMMIT says."""
    if not (checkpoint / COMMIT).exists():
        raise CorruptCheckpointError(f"{checkpoint} has no {COMMIT}: it was never completed; use another checkpoint")
    verify(checkpoint)


def learner_section(
    config: ModelConfig, hf_config: dict[str, Any], tensor: int, pipeline: int, expert: int
) -> LearnerSection:
    """The smallest layout with these sizes. Raises LayoutError."""
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
    """Read a checkpoint back and compare every HF tensor, bit by bit, with the source in the checkpoint's dtype."""
    import torch

    from megatron_bridge.checkpoint.dcp import stream_hf_tensors
    from megatron_bridge.hf.tensor_files import TensorFolder

    wanted = TensorFolder(source)
    seen = set()
    for name, tensor in stream_hf_tensors(index, config):
        original = wanted.whole(name).to(tensor.dtype)
        if not torch.equal(_bytes(original), _bytes(tensor)):
            raise ModelError(f"{name} came out with other values than {source} holds; this is a bug, report the model")
        seen.add(name)
        advance(tensor.nbytes)
    require_same_names(set(config.tensors()), seen)


def require_same_names(expected: set[str], found: set[str]) -> None:
    """Raise ModelError unless the tensors map one to one."""
    if expected != found:
        raise ModelError(f"missing {sorted(expected - found)[:5]}, left over {sorted(found - expected)[:5]}")


def run_job(
    module: str,
    job: dict[str, Any],
    num_processes: int | None,
    num_bytes: int,
    watch: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run `module` on a job in ranks, or (None) in one plain process; returns what it left in result.json."""

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
def bars() -> Iterator[Callable[[str, int], Any]]:
    """Progress bars in bytes, on stderr; where that is no terminal, lines in percent."""

    @contextmanager
    def in_lines(name: str, total: int) -> Iterator[Callable[[int], None]]:
        advanced = [0]
        with counted(f"{name}, percent:", 100) as show:

            def advance(count: int) -> None:
                advanced.append(advanced.pop() + count)
                show(100 * advanced[0] // max(total, 1))

            yield advance

    if not Console(stderr=True).is_terminal:
        yield in_lines
        return
    columns = TextColumn("{task.description:>9}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:

        @contextmanager
        def bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
            task = progress.add_task(name, total=total)
            yield lambda count: progress.advance(task, count)
            progress.update(task, completed=total)

        yield bar


def watching(folder: Path, advance: Callable[[int], None]) -> Callable[[], None]:
    """Tells `advance` by how much the folder has grown since it was last asked."""
    seen = 0

    def watch() -> None:
        nonlocal seen
        size = sum(path.stat().st_size for path in folder.glob("*.distcp"))
        advance(size - seen)
        seen = size

    return watch


def _counts(config: ModelConfig, num_bytes: int, ignored: list[str], started: float) -> dict[str, Any]:
    return dict(
        architecture=config.architecture,
        tensors=len(config.tensors()),
        parameters=config.num_parameters,
        bytes=num_bytes,
        left_over=ignored,
        wall_s=round(time.monotonic() - started, 1),
    )


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().flatten().view(torch.uint8)


def verify_megatron(hf: Path, checkpoint: Path) -> dict[str, Any]:
    """Compare an HF folder with a checkpoint of the same weights. Raises ModelError when they disagree."""
    gaps = _run(dict(kind="megatron", hf=str(hf.resolve()), checkpoint=str(checkpoint.resolve())), hf)
    if gaps["max_gap_nats"] > LARGEST_GAP_NATS:
        raise ModelError(
            f"log-probabilities of {hf} and {checkpoint} differ by up to {gaps['max_gap_nats']:.3g} nats, expected at "
            f"most {LARGEST_GAP_NATS:g}; do not use the result"
        )
    return {**gaps, "allowed_nats": LARGEST_GAP_NATS}


def verify_fp8(source: Path, folder: Path, layout: str) -> dict[str, Any]:
    """Compare an FP8 folder with the learner that emulates its formats. Raises ModelError when they disagree."""
    if ModelConfig.from_hf(read_config(source)).experts is not None:
        raise ModelError("--verify of an FP8 folder knows dense models only; the folder was written and compared")
    gaps = _run(dict(kind="fp8", hf=str(source.resolve()), folder=str(folder.resolve()), layout=layout), source)
    if gaps["mean_gap_emulated_nats"] > OPEN_SHARE * gaps["mean_gap_plain_nats"]:
        raise ModelError(
            f"the learner's emulation of {folder} is off by {gaps['mean_gap_emulated_nats']:.3g} nats in the mean, "
            f"expected at most {OPEN_SHARE:.0%} of the unquantized learner's {gaps['mean_gap_plain_nats']:.3g}; "
            "do not use the result"
        )
    return {**gaps, "allowed_share": OPEN_SHARE}


def _run(job: dict[str, Any], hf: Path) -> dict[str, Any]:
    num_bytes = 4 * sum(math.prod(header.shape) for header in tensor_headers(hf).values())
    return run_job("launch.convert.folders", job, 1, num_bytes)


def random_rows(hf_config: dict[str, Any]) -> list[list[int]]:
    """The same token rows in every call."""
    generator = random.Random(0)
    length = min(ROW_TOKENS, int(hf_config["max_position_embeddings"]))
    return [[generator.randrange(hf_config["vocab_size"]) for _ in range(length)] for _ in range(NUM_ROWS)]


def _learner(hf: Path) -> Any:
    from megatron_bridge.learner import MegatronLearner
    from precision.supervised import Supervised

    return MegatronLearner.create(
        hf, LearnerSection(precision="fp32"), Supervised(), temperature=1.0, seed=0, total_steps=1
    )


def _score_megatron(learner: Any, hf: Path, checkpoint: Path, rows: list[list[int]]) -> dict[str, Any]:
    import torch

    from megatron_bridge.checkpoint.training_state import load_weights

    chunks = [chunk.module for chunk in learner.model]
    with torch.no_grad():
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            parameter.fill_(float("nan"))  # what the checkpoint does not fill must not go unnoticed
    load_weights(checkpoint, chunks)
    ours, theirs = learner.score_tokens(rows), transformers_scores(hf, None, rows)
    return dict(max_gap_nats=float(_gaps(ours, theirs).max()), tokens=len(_gaps(ours, theirs)))


def _score_fp8(
    learner: Any, hf_config: dict[str, Any], folder: Path, layout: Any, rows: list[list[int]]
) -> dict[str, Any]:
    from megatron_bridge.step.fp8_emulation import emulated

    quant = fp8_map(hf_config, learner.model_config, layout)
    plain = learner.score_tokens(rows)
    with emulated(learner, quant):
        ours = learner.score_tokens(rows)
    theirs = transformers_scores(folder, quant, rows)
    return dict(
        mean_gap_emulated_nats=float(_gaps(ours, theirs).mean()),
        max_gap_emulated_nats=float(_gaps(ours, theirs).max()),
        mean_gap_plain_nats=float(_gaps(plain, theirs).mean()),
        tokens=len(_gaps(ours, theirs)),
    )


def transformers_scores(folder: Path, quant: Any, rows: Sequence[Sequence[int]]) -> Scores:
    """[n - 1] log-probabilities of each row of n tokens; with a quant map, of a stored FP8 folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hf_config = AutoConfig.from_pretrained(folder)
    if quant is None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        model = _dequantized_model(hf_config, folder, quant)
    model.eval()
    scores = []
    with torch.no_grad():
        for row in rows:
            tokens = torch.tensor([list(row)])
            logprobs = torch.log_softmax(model(tokens).logits[0, :-1].float(), -1)
            scores.append(logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy())
    return scores


def _dequantized_model(hf_config: Any, folder: Path, quant: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_bridge.hf.fp8 import dequantized_tensors

    del hf_config.quantization_config
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    left = model.load_state_dict(dict(dequantized_tensors(folder, torch.float32)), strict=False)
    if left.unexpected_keys or set(left.missing_keys) - {"lm_head.weight"}:
        raise ModelError(f"{folder} does not fill the model of its config.json: {left}")
    model.tie_weights()
    for module, rollout_format in quant.formats.items():
        model.get_submodule(module).register_forward_pre_hook(_quantize_input(rollout_format))
    return model


def _quantize_input(rollout_format: Any) -> Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]:
    from precision.formats.formats import fake_quantize

    return lambda _, inputs: (fake_quantize(inputs[0], rollout_format, per_token=True), *inputs[1:])


def _gaps(ours: Scores, theirs: Scores) -> NDArray[np.float64]:
    pairs = zip(ours, theirs, strict=True)
    gaps = np.concatenate([np.abs(np.asarray(a, np.float64) - b) for a, b in pairs])
    if not np.isfinite(gaps).all():
        raise ModelError("log-probabilities are not finite: the weights are damaged; do not use the result")
    return gaps


def do_job(run: RunDirectory) -> None:
    """Do what job.json names, in one rank: write this rank's share of a checkpoint, or score rows by both sides, into
    result.json."""
    job = json.loads((run.path / "job.json").read_text(encoding="utf-8"))
    if job["kind"] == "write":
        _write_share(job)
        return
    hf_config = read_config(Path(job["hf"]))
    rows, learner = random_rows(hf_config), _learner(Path(job["hf"]))
    if job["kind"] == "megatron":
        result = _score_megatron(learner, Path(job["hf"]), Path(job["checkpoint"]), rows)
    else:
        result = _score_fp8(learner, hf_config, Path(job["folder"]), job["layout"], rows)
    (run.path / "result.json").write_text(json.dumps(result), encoding="utf-8")


def _write_share(job: dict[str, Any]) -> None:
    """Load this rank's share of the HF folder, and save it with the other ranks."""
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


if __name__ == "__main__":
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "conversion", lambda: do_job(directory))
