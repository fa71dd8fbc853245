"""The YAML file of a quant map: a base format, and the modules that are held in another one. Needs no torch.

    base: fp8_block
    exceptions:
      model.layers.0.mlp.down_proj: full
      model.layers.3.mlp.experts: full

Names are exact Hugging Face names of linear layers; the experts of a mixture, which have one format together, may be
named as one. `full` is the dtype in which the engine computes. bf16, fp16 and fp32 are the same, and are refused when
the engine computes in another one. The emulated formats are for studies: engines on CPUs and the learner emulate
them. So are fp8_channel and mxfp8, which the learner alone emulates, and a recipe does not take.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from precision.formats.rollout_format import RolloutFormat
from precision.settings import Settings
from precision.text import YamlError, dump_yaml, listed, one_line, parse_yaml, read_yaml

ModuleFormat = Literal[
    "full",
    "bf16",
    "fp16",
    "fp32",
    "fp8_tensor",
    "fp8_block",
    "fp8_channel",
    "mxfp8",
    "emulated_fp6",
    "emulated_fp4",
    "emulated_nvfp4",
    "emulated_mxfp4",
]
ENGINE_DTYPES: dict[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""The formats that name a dtype, and that dtype as SGLang calls it."""


class QuantMapFile(Settings):
    """What the file says, before the names are compared with a model (precision.formats.quant_map.QuantMap)."""

    base: ModuleFormat = Field(description="Format of every linear layer of the decoder that is not an exception.")
    exceptions: dict[str, ModuleFormat] = Field(default_factory=dict, description="Exact module name → its format.")

    @classmethod
    def read(cls, path: Path) -> QuantMapFile:
        """Raises ValueError, in one line, for a file that cannot be read or says something else."""
        try:
            data = read_yaml(path)
        except OSError as error:
            raise ValueError(
                f"cannot read quant map {one_line(path, 200)}: {error.strerror}; give the path of a YAML file"
            ) from error
        except YamlError as error:
            raise ValueError(f"quant map {path}: {error}") from None
        return cls._of(data, path)

    @classmethod
    def parse(cls, text: str, path: Path) -> QuantMapFile:
        """The text of the file at `path`. Raises ValueError as `read` does."""
        try:
            return cls._of(parse_yaml(text), path)
        except YamlError as error:
            raise ValueError(f"quant map {path}: {error}") from None

    @classmethod
    def _of(cls, data: Any, path: Path) -> QuantMapFile:
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            problems = [_explained(one["loc"], one["msg"]) for one in error.errors(include_url=False)]
            raise ValueError(f"quant map {path}: {listed(problems)}; expected `base` and `exceptions`") from None

    def to_yaml(self) -> str:
        """The file's text."""
        return dump_yaml(self.model_dump(mode="json"))

    def rollout_formats(self) -> frozenset[RolloutFormat]:
        """The quantized formats that it names."""
        named = {self.base, *self.exceptions.values()}
        return frozenset(RolloutFormat(name) for name in named if name in tuple(RolloutFormat))

    def check_dtype(self, dtype: str) -> None:
        """Raises ValueError when a module is to be held in another dtype than the engine's (`--dtype`)."""
        for module, name in (("base", self.base), *self.exceptions.items()):
            if ENGINE_DTYPES.get(name, dtype) != dtype:
                raise ValueError(
                    f"{module} is {name}, but the engines of this run compute in {dtype}, which is the only "
                    "dtype they hold beside FP8; write full, or change learner.precision"
                )


def _explained(where: Sequence[int | str], what: str) -> str:
    return f"{one_line('.'.join(map(str, where)), 120)}: {one_line(what, 200)}"


def rollout_format_of(name: ModuleFormat) -> RolloutFormat | None:
    """None for what is not quantized."""
    return RolloutFormat(name) if name in tuple(RolloutFormat) else None
