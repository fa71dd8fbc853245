"""Define the `evenkeel convert` commands. Each imports its modules when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from launch.terminal import AsJson, emit, emit_or_print

convert_app = typer.Typer(
    help="Convert model folders between Hugging Face, Megatron and FP8, and look into them.\n\n"
    "Every conversion checks the source's headers first, reads back what it wrote, compares it with the source, and "
    "only then gives the folder its name: OUT is complete or absent, and any difference ends with exit code 1.",
    no_args_is_help=True,
)

Source = Annotated[Path, typer.Argument(help="HF folder: config.json, safetensors, tokenizer.", show_default=False)]
Out = Annotated[Path, typer.Argument(help="Folder to make; must not exist, or be empty.", show_default=False)]
Verify = Annotated[
    bool, typer.Option("--verify", help="Also compare log-probabilities of random rows (loads the model whole).")
]


@convert_app.command("hf-to-megatron")
def hf_to_megatron_command(
    source: Source,
    out: Out,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, max=2**16, help="Ranks that share each layer while writing.")
    ] = 1,
    pipeline_parallel: Annotated[int, typer.Option(min=1, max=2**16, help="Pipeline stages while writing.")] = 1,
    expert_parallel: Annotated[int, typer.Option(min=1, max=2**16, help="MoE: ranks that share the experts.")] = 1,
    dtype: Annotated[
        Literal["bf16", "fp32", "keep"], typer.Option(help="Dtype of the checkpoint; keep needs a source of one dtype.")
    ] = "keep",
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """Write the weights as a Megatron distributed checkpoint (torch_dist) that any layout can load.

    Ranks of the given layout load and save their shares; memory is the model divided by them. OUT also gets
    config.json, the tokenizer and COMMIT with the SHA-256 of every file. The checkpoint is read back and compared bit
    by bit. --verify: the learner on OUT against transformers on the source, at most 1e-3 nats apart in float32.

    Example: `evenkeel convert hf-to-megatron models/Qwen3-8B models/Qwen3-8B-mcore --tensor-parallel 4 --dtype bf16`
    """
    from launch.convert.folders import hf_to_megatron

    result = hf_to_megatron(
        source,
        out,
        tensor=tensor_parallel,
        pipeline=pipeline_parallel,
        expert=expert_parallel,
        dtype=dtype,
        verify_logprobs=verify,
    )
    emit_or_print(result, as_json)


@convert_app.command("megatron-to-hf")
def megatron_to_hf_command(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder of hf-to-megatron, or runs/NAME/checkpoints/STEP.", show_default=False)
    ],
    out: Out,
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """Write an HF folder from a distributed checkpoint, one tensor after another; no model is built.

    A run's checkpoint gets config.json and tokenizer from its recipe's model.path. Every file is checked against COMMIT
    before, every tensor after. --verify: transformers on OUT against the learner on the checkpoint.

    Example: `evenkeel convert megatron-to-hf runs/demo/checkpoints/000040 models/demo-40`
    """
    from launch.convert.folders import megatron_to_hf

    emit_or_print(megatron_to_hf(checkpoint, out, verify_logprobs=verify), as_json)


@convert_app.command("hf-to-fp8")
def hf_to_fp8_command(
    source: Source,
    out: Out,
    format_: Annotated[
        Literal["block128", "tensor"],
        typer.Option("--format", help="block128: a scale for each 128×128 block; tensor: a scale for each matrix."),
    ],
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """Write an FP8 checkpoint that stock SGLang serves as it is; activations are quantized by the engine.

    block128 is the layout of DeepSeek's and Qwen's FP8 releases (`weight` e4m3, `weight_scale_inv`); tensor stores
    `weight_scale`, shared by what the engine stacks. Embeddings, norms and LM head stay as they are. Streams: memory
    stays below 1 GiB whatever the model's size. --verify: the learner emulating these formats against the
    dequantized folder; the mean gap may be at most 10 % of the unquantized learner's.

    Example: `evenkeel convert hf-to-fp8 models/Qwen3-32B models/Qwen3-32B-FP8 --format block128`
    """
    from launch.convert.folders import hf_to_fp8

    emit_or_print(hf_to_fp8(source, out, format_, verify_logprobs=verify), as_json)


@convert_app.command("hf-to-modelopt")
def hf_to_modelopt_command(
    source: Source,
    out: Out,
    calibration: Annotated[
        Path | None, typer.Option(help='JSONL with a "prompt" or "text" a line; default: random tokens.')
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Quantize to FP8 with NVIDIA ModelOpt: calibrated, static scales for weights and inputs.

    Unlike hf-to-fp8 this loads the whole model with transformers and runs the calibration prompts through it. A scale
    that is missing, not finite, or left at the engine's default of 1.0 is an error; the range of every kind of scale is
    printed. Needs the extra `convert`. SGLang serves it with --quantization modelopt_fp8, on GPUs.

    Example: `evenkeel convert hf-to-modelopt models/Qwen3-8B models/Qwen3-8B-FP8 --calibration prompts.jsonl`
    """
    from launch.convert.modelopt import hf_to_modelopt

    emit_or_print(hf_to_modelopt(source, out, calibration=calibration), as_json)


@convert_app.command("inspect")
def inspect_command(
    folder: Annotated[Path, typer.Argument(help="Model, policy or checkpoint folder.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Say what a folder is: format, architecture, parameters, bytes by dtype, quantized share, distinct shapes.

    Reads headers and indexes only. A damaged or unknown folder ends with one line that says what is wrong.

    Example: `evenkeel convert inspect runs/demo/policy/000012`
    """
    from launch.convert.inspect import inspect_folder

    result = inspect_folder(folder)
    if as_json:
        emit(result)
        return
    shapes = result.pop("shapes")
    emit_or_print(result, False)
    from rich.console import Console
    from rich.table import Table

    table = Table("tensor", "shape", "dtype", "count", box=None)
    for row in shapes:
        table.add_row(row["name"], "×".join(map(str, row["shape"])) or "scalar", row["dtype"], str(row["count"]))
    Console().print(table)
