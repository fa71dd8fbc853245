"""`evenkeel convert`: model folders between Hugging Face, Megatron and FP8.

    check the source's headers ──▶ write OUT.tmp-PID ──▶ read it back, compare ──▶ rename to OUT

A conversion that finds any difference between what it read and what lies on disk raises, and leaves no OUT behind.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from launch.run.processes import child_environment, run_ranks, torchrun
from megatron_bridge.hf.headers import check_weights, tensor_headers
from megatron_bridge.hf.model_config import ModelConfig, read_config, read_hf_config
from megatron_bridge.parallel.layout import Layout, check_layout
from pipeline.config.layout_names import layout_name
from pipeline.config.recipe import LearnerSection
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


def hf_to_megatron(
    source: Path, out: Path, *, tensor: int, pipeline: int, expert: int, dtype: Number, verify_logprobs: bool
) -> dict[str, Any]:
    """HF folder → weights-only distributed checkpoint. Raises ModelError, LayoutError, CorruptCheckpointError."""
    from megatron_bridge.checkpoint.dcp_reader import CheckpointIndex
    from megatron_bridge.hf.sidecars import copy_companions, write_json
    from megatron_bridge.hf.streaming_writer import check_free, new_folder

    started = time.monotonic()
    check_free(out)
    config, shape, ignored = checked_source(source)
    section = learner_section(shape, config, tensor, pipeline, expert)
    kind = chosen_dtype(source, dtype)
    total = sum(math.prod(size) for size in shape.tensors().values()) * (2 if kind == "BF16" else 4)
    with new_folder(out) as folder, bars() as bar:
        job = dict(source=str(source.resolve()), out=str(folder.resolve()), dtype=kind, learner=section.model_dump())
        with bar("write", total) as advance:
            run_job("launch.convert.ranks", job, section.num_processes, total, watching(folder, advance))
        copy_companions(source, folder)
        named = {key: value for key, value in config.items() if key != "torch_dtype"}
        write_json(folder / "config.json", named | {"dtype": "bfloat16" if kind == "BF16" else "float32"})
        with bar("compare", total) as advance:
            compare_with_source(CheckpointIndex(folder), shape, source, advance)
        commit(folder, 0)
    result = dict(
        out=str(out),
        format="megatron",
        written_by=layout_name(section),
        dtype=kind,
        **_counts(shape, total, ignored, started),
    )
    if verify_logprobs:
        from launch.convert.verify import verify_megatron

        result["verify"] = verify_megatron(source, out)
    return result


def megatron_to_hf(checkpoint: Path, out: Path, *, verify_logprobs: bool) -> dict[str, Any]:
    """Checkpoint of `hf_to_megatron`, or of a run, → HF folder, one tensor after another."""
    from megatron_bridge.checkpoint.dcp_reader import CheckpointIndex
    from megatron_bridge.checkpoint.dcp_to_hf import find_sources, stored_dtype, stream_hf_tensors
    from megatron_bridge.hf.safetensors_stream import TensorSpec
    from megatron_bridge.hf.streaming_writer import (
        check_free,
        check_written,
        complete_folder,
        new_folder,
        write_weights,
    )

    started = time.monotonic()
    check_free(out)
    described = description_of(checkpoint)
    config = read_config(described)
    shape = ModelConfig.from_hf(config)
    check_committed(checkpoint)
    index = CheckpointIndex(checkpoint)
    sources, dtype, sizes = find_sources(checkpoint, index.tensors, shape), stored_dtype(index), shape.tensors()
    groups = [[TensorSpec(name, sizes[name], dtype) for name in source.names] for source in sources]
    total = sum(spec.nbytes for group in groups for spec in group)
    with new_folder(out) as folder, bars() as bar:
        with bar("write", total) as advance:
            manifest = write_weights(folder, groups, stream_hf_tensors(index, shape), advance=advance)
        named = {key: value for key, value in config.items() if key != "torch_dtype"}
        complete_folder(folder, described, named | {"dtype": str(dtype).removeprefix("torch.")}, manifest)
        with bar("compare", total) as advance:
            check_written(folder, manifest, advance)
        require_same_names(set(sizes), set(manifest))
    result = dict(out=str(out), format="hf", dtype=str(dtype), **_counts(shape, total, [], started))
    if verify_logprobs:
        from launch.convert.verify import verify_megatron

        result["verify"] = verify_megatron(out, checkpoint)
    return result


def hf_to_fp8(source: Path, out: Path, layout: Fp8Layout, *, verify_logprobs: bool) -> dict[str, Any]:
    """HF folder → FP8 HF folder for stock SGLang, in bounded memory. Raises ModelError, NonFiniteError."""
    from megatron_bridge.hf.fp8 import output_bytes, write_fp8_folder
    from megatron_bridge.hf.streaming_writer import check_free, check_written, new_folder

    started = time.monotonic()
    check_free(out)
    config, shape, ignored = checked_source(source)
    quant = fp8_map(config, shape, layout)
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
        **_counts(shape, total, ignored, started),
    )
    if verify_logprobs:
        from launch.convert.verify import verify_fp8

        result["verify"] = verify_fp8(source, out, layout)
    return result


def fp8_map(config: dict[str, Any], shape: ModelConfig, layout: Fp8Layout) -> QuantMap:
    """Which weights are quantized. Raises ModelError for widths that blocks cannot cut."""
    from precision.formats.quant_map import QuantMap
    from rollout_sglang.server.block_shapes import check_block_shapes

    experts = shape.experts
    if layout == "block128":
        check_block_shapes(config)
    rollout_format = "fp8_block" if layout == "block128" else "fp8_tensor"
    return QuantMap.for_decoder(shape.num_layers, rollout_format, None if experts is None else experts.count)


def checked_source(source: Path) -> tuple[dict[str, Any], ModelConfig, list[str]]:
    """(config, shape, names that are not carried over) of an HF folder whose headers are all as they should be.

    Raises ModelError naming every tensor that is missing, misshapen or not part of the architecture.
    """
    config = read_hf_config(source)
    shape = ModelConfig.from_hf(config)
    check_weights(source, shape)
    ignored = sorted(set(tensor_headers(source)) - set(shape.tensors()))
    if "lm_head.weight" in ignored:
        _require_tied(source)
    return config, shape, ignored


def learner_section(
    shape: ModelConfig, config: dict[str, Any], tensor: int, pipeline: int, expert: int
) -> LearnerSection:
    """The smallest layout with these sizes. Raises LayoutError."""
    section = LearnerSection(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        expert_parallel=expert,
        data_parallel=expert // math.gcd(expert, tensor),
        sequence_parallel=shape.experts is not None and tensor > 1,
    )
    try:
        check_layout(config, section)
    except LayoutError as error:
        message = str(error)
        for size in ("tensor", "pipeline", "expert"):
            message = message.replace(f"learner.{size}_parallel", f"--{size}-parallel")
        raise LayoutError(message) from None
    assert Layout.of(section).num_processes == section.num_processes
    return section


def chosen_dtype(source: Path, dtype: Number) -> str:
    """BF16 or F32. Raises ModelError when `keep` has nothing to keep."""
    if dtype != "keep":
        return SAFETENSORS_DTYPES[dtype]
    kinds = {kind for _, kind in tensor_headers(source).values()}
    if len(kinds) != 1 or not kinds <= set(SAFETENSORS_DTYPES.values()):
        raise ModelError(
            f"{source} holds {', '.join(sorted(kinds))}, and --dtype keep needs BF16 or F32 throughout; "
            "choose --dtype bf16 or --dtype fp32"
        )
    return kinds.pop()


def compare_with_source(index: Any, shape: ModelConfig, source: Path, advance: Callable[[int], None]) -> None:
    """Read a checkpoint back and compare every HF tensor, bit by bit, with the source in the checkpoint's dtype."""
    import torch

    from megatron_bridge.checkpoint.dcp_to_hf import stream_hf_tensors
    from megatron_bridge.hf.safetensors_stream import TensorFolder

    wanted = TensorFolder(source)
    seen = set()
    for name, tensor in stream_hf_tensors(index, shape):
        original = wanted.whole(name).to(tensor.dtype)
        if not torch.equal(_bytes(original), _bytes(tensor)):
            raise ModelError(f"{name} came out with other values than {source} holds; this is a bug, report the model")
        seen.add(name)
        advance(tensor.nbytes)
    require_same_names(set(shape.tensors()), seen)


def require_same_names(expected: set[str], found: set[str]) -> None:
    """Raise ModelError unless the tensors map one to one."""
    if expected != found:
        raise ModelError(f"missing {sorted(expected - found)[:5]}, left over {sorted(found - expected)[:5]}")


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


@contextmanager
def bars() -> Iterator[Callable[[str, int], Any]]:
    """Progress bars in bytes, on stderr."""
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
        (run.path / "job.json").write_text(json.dumps(job))
        ranks = [sys.executable, "-m", module, scratch]
        command = ranks if num_processes is None else torchrun(num_processes, module, scratch)
        deadline = 600.0 + num_bytes / SLOWEST_BYTES_S
        log = run.logs / "conversion.log"
        run_ranks(run, command, log=log, env=child_environment(), watch=watch, deadline_s=deadline)
        path = run.path / "result.json"
        return json.loads(path.read_text()) if path.exists() else {}


def _counts(shape: ModelConfig, num_bytes: int, ignored: list[str], started: float) -> dict[str, Any]:
    sizes = shape.tensors().values()
    return dict(
        architecture=shape.architecture,
        tensors=len(sizes),
        parameters=sum(math.prod(size) for size in sizes),
        bytes=num_bytes,
        left_over=ignored,
        wall_s=round(time.monotonic() - started, 1),
    )


def _require_tied(source: Path) -> None:
    """An LM head that a tied model stores as well may be left out only if it is the embedding."""
    from megatron_bridge.hf.safetensors_stream import TensorFolder, digest

    folder = TensorFolder(source)
    if digest(folder, "lm_head.weight") != digest(folder, "model.embed_tokens.weight"):
        raise ModelError(
            f"{source}: tie_word_embeddings is true, but lm_head.weight is not model.embed_tokens.weight; "
            "set it to false in config.json, or remove lm_head.weight"
        )


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().flatten().view(torch.uint8)
