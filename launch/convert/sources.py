"""What `evenkeel convert` reads: the checks before a conversion, and what it takes from the source's headers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_bridge.hf.headers import check_weights, tensor_headers
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from pipeline.data.checksums import verify_folder
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import CorruptCheckpointError, ModelError
from pipeline.trainer.checkpoints import COMMIT, verify

if TYPE_CHECKING:
    from precision.formats.quant_map import QuantMap

Number = Literal["bf16", "fp32", "keep"]
Fp8Layout = Literal["block128", "tensor"]

SAFETENSORS_DTYPES = {"bf16": "BF16", "fp32": "F32"}


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
    from megatron_bridge.hf.tensor_folder import TensorFolder

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
    from rollout_sglang.server.block_shapes import check_block_shapes

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
