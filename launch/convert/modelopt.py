"""Quantize a model with NVIDIA ModelOpt in a child process, store the result, and check every scale.

    transformers model ─▶ insert quantizers ─▶ run the calibration rows ─▶ export_hf_checkpoint ─▶ OUT

The child process is needed since importing ModelOpt patches torch and transformers.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from launch.convert.folders import bar, checked_source, require_same_names, run_job
from launch.run.processes import run_child
from megatron_bridge.hf.folders import check_free, new_folder
from megatron_bridge.hf.headers import tensor_headers
from megatron_bridge.hf.model_config import ModelConfig, read_config, read_hf_config
from pipeline.child_process import die_with_parent
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import ModelError
from pipeline.tasks.tokenizer import Tokenizer
from precision.text import one_line, parse_object

CALIBRATION_ROWS, ROW_TOKENS = 32, 128
"""Number and length of random rows when no prompts are given; prompts are cut to 16 times the length."""


def hf_to_modelopt(source: Path, out: Path, *, calibration: Path | None) -> dict[str, Any]:
    """Write an HF folder as an FP8 folder with calibrated, static scales. Raises ModelError."""
    from megatron_bridge.hf.modelopt import SCALES, check_scales, store_export
    from megatron_bridge.hf.tensor_files import check_written
    from precision.formats.quant_map import QuantMap

    started = time.monotonic()
    check_free(out)
    hf_config, config, ignored = checked_source(source)
    if config.experts is not None:
        raise ModelError(f"{config.architecture} has experts, hf-to-modelopt knows dense models; use hf-to-fp8")
    rows = calibration_rows(source, hf_config, calibration)
    with new_folder(out) as folder:
        export = folder / "export"
        job = dict(source=str(source.resolve()), export=str(export.resolve()), rows=rows)
        size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        with bar("calibrate", size):
            run_job("launch.convert.modelopt", job, None, size * len(rows))
        with bar("write", size) as advance:
            manifest = store_export(export, source, folder, read_config(export), advance=advance)
        shutil.rmtree(export)
        with bar("compare", size) as advance:
            check_written(folder, manifest, advance)
        expected = config.tensors()
        found = {
            name: one.shape for name, one in tensor_headers(folder).items() if name.rpartition(".")[2] not in SCALES
        }
        require_same_names(set(expected), set(found))
        if wrong := [f"{name} {list(size)}" for name, size in found.items() if size != expected[name]]:
            raise ModelError(f"ModelOpt changed the shape of {', '.join(wrong[:5])}; report the model")
        scales = check_scales(folder, QuantMap.for_decoder(config.num_layers, "fp8_tensor"))
    return dict(
        out=str(out),
        format="modelopt fp8",
        calibration_rows=len(rows),
        calibration_tokens=sum(map(len, rows)),
        scales=scales,
        left_over=ignored,
        wall_s=round(time.monotonic() - started, 1),
    )


def calibration_rows(source: Path, hf_config: dict[str, Any], path: Path | None) -> list[list[int]]:
    """Return token rows for the calibration: prompts of a JSONL file, or random tokens. Raises ModelError."""
    longest = int(hf_config["max_position_embeddings"])
    if path is None:
        generator = random.Random(0)
        length = min(ROW_TOKENS, longest)
        return [[generator.randrange(hf_config["vocab_size"]) for _ in range(length)] for _ in range(CALIBRATION_ROWS)]
    tokenizer = Tokenizer.load(source, vocab_size=hf_config["vocab_size"])
    try:
        lines = [parse_object(line) for line in path.read_bytes().split(b"\n") if line.strip()]
        texts = [str(line["prompt"] if "prompt" in line else line["text"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f'--calibration {path} is not readable as JSONL with a "prompt" or "text" in each line '
            f"({type(error).__name__}: {one_line(error, 200)}); correct the file"
        ) from error
    rows = [tokenizer.encode(text)[: min(16 * ROW_TOKENS, longest)] for text in texts]
    rows = [list(row) for row in rows if row]
    if not rows:
        raise ModelError(f"--calibration {path} holds no prompts; give at least one")
    return rows


def calibrate(run: RunDirectory) -> None:
    """Do the job of job.json (source, export and rows) in the child process."""
    from megatron_bridge.hf.modelopt import export_quantized
    from precision.formats.quant_map import QuantMap

    job = json.loads((run.path / "job.json").read_text(encoding="utf-8"))
    source = Path(job["source"])
    config = ModelConfig.from_hf(read_hf_config(source))
    quant = QuantMap.for_decoder(config.num_layers, "fp8_tensor")
    export_quantized(source, Path(job["export"]), job["rows"], quant=quant)


if __name__ == "__main__":
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "calibration", lambda: calibrate(directory))
