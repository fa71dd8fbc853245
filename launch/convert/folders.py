"""`evenkeel convert`: model folders between Hugging Face, Megatron and FP8.

    check the source's headers ──▶ write OUT.tmp-PID ──▶ read it back, compare ──▶ rename to OUT

A conversion that finds any difference between what it read and what lies on disk raises, and leaves no OUT behind.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from launch.convert.jobs import run_job
from launch.convert.sources import (
    Fp8Layout,
    Number,
    check_committed,
    checked_source,
    chosen_dtype,
    description_of,
    fp8_map,
)
from launch.progress import counted
from megatron_bridge.hf.folders import check_free, complete_folder, describe_folder, new_folder
from megatron_bridge.hf.headers import DTYPES
from megatron_bridge.hf.model_config import ModelConfig, read_config
from megatron_bridge.parallel.layout import Layout
from megatron_bridge.parallel.layout_checks import check_layout
from pipeline.config.layout_names import layout_name
from pipeline.config.recipe import LearnerSection
from pipeline.errors import LayoutError, ModelError, NonFiniteError
from pipeline.trainer.checkpoints import commit


def hf_to_megatron(
    source: Path, out: Path, *, tensor: int, pipeline: int, expert: int, dtype: Number, verify_logprobs: bool
) -> dict[str, Any]:
    """HF folder → weights-only distributed checkpoint. Raises ModelError, LayoutError, CorruptCheckpointError."""
    from megatron_bridge.checkpoint.dcp_reader import CheckpointIndex

    started = time.monotonic()
    check_free(out)
    hf_config, config, ignored = checked_source(source)
    section = learner_section(config, hf_config, tensor, pipeline, expert)
    kind = chosen_dtype(source, dtype)
    total = config.num_parameters * (2 if kind == "BF16" else 4)
    with new_folder(out) as folder, bars() as bar:
        job = dict(source=str(source.resolve()), out=str(folder.resolve()), dtype=kind, learner=section.model_dump())
        with bar("write", total) as advance:
            run_job("launch.convert.ranks", job, section.num_processes, total, watching(folder, advance))
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
        from launch.convert.verify import verify_megatron

        result["verify"] = verify_megatron(source, out)
    return result


def megatron_to_hf(checkpoint: Path, out: Path, *, verify_logprobs: bool) -> dict[str, Any]:
    """Checkpoint of `hf_to_megatron`, or of a run, → HF folder, one tensor after another."""
    from megatron_bridge.checkpoint.dcp_reader import CheckpointIndex
    from megatron_bridge.checkpoint.dcp_to_hf import stored_dtype, stream_hf_tensors
    from megatron_bridge.hf.shard_writer import check_written, whole_tensors, write_shards

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
        from launch.convert.verify import verify_megatron

        result["verify"] = verify_megatron(out, checkpoint)
    return result


def hf_to_fp8(source: Path, out: Path, layout: Fp8Layout, *, verify_logprobs: bool) -> dict[str, Any]:
    """HF folder → FP8 HF folder for stock SGLang, in bounded memory. Raises ModelError, NonFiniteError."""
    from megatron_bridge.hf.fp8 import output_bytes, write_fp8_folder
    from megatron_bridge.hf.shard_writer import check_written

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
        from launch.convert.verify import verify_fp8

        result["verify"] = verify_fp8(source, out, layout)
    return result


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

    from megatron_bridge.checkpoint.dcp_to_hf import stream_hf_tensors
    from megatron_bridge.hf.tensor_folder import TensorFolder

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
