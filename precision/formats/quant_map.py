"""Map each module of a model to its format, by exact Hugging Face name, and read and write maps. Needs no torch.

Both sides use one map: it determines the tensors that a publish sends, the learner's emulation
(precision.formats.streams), and the config of an engine's checkpoint.

Engines stack q, k and v, and gate and up, into one matrix each, which has one format. They also hold the experts of a
layer as one module with one format. The stacks and mixtures are the groups, the smallest units that change format.

A map's file is YAML: a base format, and the modules with other formats.

    base: fp8_block
    exceptions:
      model.layers.0.mlp.down_proj: full
      model.layers.3.mlp.experts: full

Names are exact Hugging Face names of linear layers; a mixture may be named as a whole. `full` is the dtype in which the
engine computes. bf16, fp16 and fp32 name that dtype explicitly, and are refused when the engine computes in another.
fp8_channel and mxfp8 are emulated only by the learner.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from precision.formats.rollout_format import BLOCK, EMULATED_METHOD, STACKS, RolloutFormat
from precision.settings import Settings
from precision.text import YamlError, dump_yaml, listed, one_line, parse_yaml, read_yaml

FUSED_ATTENTION = (tuple(f"self_attn.{part}" for part in STACKS["qkv_proj"]), ("self_attn.o_proj",))
FUSED_MLP = (STACKS["gate_up_proj"], ("down_proj",))
"""The linear layers of a Qwen3, Qwen2 or Llama decoder layer, grouped as engines stack them; `FUSED_MLP` is below `mlp`
in dense layers, below `mlp.experts.N` in a mixture."""

_EXPERT = re.compile(r"(.+\.experts)\.\d+\..+")
_STACK_OF = {parts: stack for stack, parts in STACKS.items()}
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
FULL: ModuleFormat = "full"
_QUANTIZED: Mapping[str, RolloutFormat] = {rollout_format.value: rollout_format for rollout_format in RolloutFormat}
ENGINE_DTYPES: dict[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""The formats that name a dtype → SGLang's name of the dtype."""


class QuantMapFile(Settings):
    """The content of the file, before its names are compared with a model (precision.formats.quant_map.QuantMap)."""

    base: ModuleFormat = Field(description="Format of every linear layer of the decoder that is not an exception.")
    exceptions: dict[str, ModuleFormat] = Field(default_factory=dict, description="Exact module name → its format.")

    @classmethod
    def read(cls, path: Path, text: str | None = None) -> QuantMapFile:
        """Read the file at `path`, or its `text`. Raises ValueError, in one line, for an unreadable or invalid file."""
        try:
            return cls.model_validate(read_yaml(path) if text is None else parse_yaml(text))
        except OSError as error:
            raise ValueError(
                f"cannot read quant map {one_line(path, 200)}: {error.strerror}; give the path of a YAML file"
            ) from error
        except YamlError as error:
            raise ValueError(f"quant map {path}: {error}") from None
        except ValidationError as error:
            problems = [
                f"{one_line('.'.join(map(str, one['loc'])), 120)}: {one_line(one['msg'], 200)}"
                for one in error.errors(include_url=False)
            ]
            raise ValueError(f"quant map {path}: {listed(problems)}; expected `base` and `exceptions`") from None

    def to_yaml(self) -> str:
        return dump_yaml(self.model_dump(mode="json"))

    def rollout_formats(self) -> frozenset[RolloutFormat]:
        """Return the quantized formats in the file."""
        return frozenset(_QUANTIZED[name] for name in (self.base, *self.exceptions.values()) if name in _QUANTIZED)

    def check_dtype(self, dtype: str) -> None:
        """Raise ValueError when a module has another dtype than the engine's (`--dtype`)."""
        for module, name in (("base", self.base), *self.exceptions.items()):
            if ENGINE_DTYPES.get(name, dtype) != dtype:
                raise ValueError(
                    f"{module} is {name}, but the engines of this run compute in {dtype}, which is the only "
                    "dtype they hold beside FP8; write full, or change learner.precision"
                )


@dataclass(frozen=True)
class QuantMap:
    """Module name, such as `model.layers.0.self_attn.q_proj` → format; other modules are not quantized."""

    formats: Mapping[str, RolloutFormat]
    fused_groups: tuple[tuple[str, ...], ...]
    """Every module that can be quantized, in exactly one group: the modules that the engine stacks into one matrix."""
    _shares: dict[frozenset[str], QuantMap] = field(init=False, repr=False, compare=False, default_factory=dict)
    """What `restricted` has returned: a rank asks for the same share at each publish."""

    def __post_init__(self) -> None:
        modules = [module for group in self.fused_groups for module in group]
        if len(set(modules)) < len(modules):
            twice = next(module for module in modules if modules.count(module) > 1)
            raise ValueError(f"{twice} is in two fused groups of the quant map; give each module exactly one")
        self._require_known(self.formats)
        for group in self.fused_groups:
            self._require_one_format(group, "are stacked by the engine")

    @classmethod
    def for_decoder(
        cls, num_layers: int, rollout_format: RolloutFormat | str | None, num_experts: int | None = None
    ) -> QuantMap:
        """Return the map of all attention and MLP projections of a decoder; embeddings, norms, routers and lm_head are
        never quantized. Format None: nothing is quantized yet. With `num_experts`, the MLP of every layer is a mixture
        of as many. Raises ValueError for an unknown format, no layers or no experts."""
        if num_layers < 1:
            raise ValueError(f"num_layers is {num_layers}, expected at least 1; read it from the model's config.json")
        if num_experts is not None and num_experts < 1:
            raise ValueError(f"num_experts is {num_experts}, expected at least 1, or None for a dense model")
        parts = ["mlp"] if num_experts is None else [f"mlp.experts.{expert}" for expert in range(num_experts)]
        layer_groups = list(FUSED_ATTENTION)
        layer_groups += [tuple(f"{part}.{projection}" for projection in group) for part in parts for group in FUSED_MLP]
        groups = tuple(
            tuple(f"model.layers.{layer}.{projection}" for projection in group)
            for layer in range(num_layers)
            for group in layer_groups
        )
        if rollout_format is None:
            return cls(formats={}, fused_groups=groups)
        chosen = RolloutFormat.named(rollout_format)
        return cls(formats={module: chosen for group in groups for module in group}, fused_groups=groups)

    @classmethod
    def from_file(cls, file: QuantMapFile, num_layers: int, num_experts: int | None = None) -> QuantMap:
        """Return the file's map of a model. Raises ValueError for a name that the model does not have, with the nearest
        valid name, and when the modules of a group have different formats."""
        whole = cls.for_decoder(num_layers, _QUANTIZED.get(file.base), num_experts)
        formats: dict[str, RolloutFormat | None] = dict(whole.formats)
        mixtures = {name: modules for name, modules in whole.groups.items() if name.endswith(".experts")}
        whole._require_known(name for name in file.exceptions if name not in mixtures)
        for name, module_format in file.exceptions.items():
            formats |= dict.fromkeys(mixtures.get(name, (name,)), _QUANTIZED.get(module_format))
        made = replace(whole, formats={module: chosen for module, chosen in formats.items() if chosen is not None})
        for modules in mixtures.values():
            made._require_one_format(modules, "are one module of the engine")
        return made

    def to_file(self) -> QuantMapFile:
        """Return a file from which `from_file` makes the same map."""
        counts = {name: list(self.formats.values()).count(name) for name in RolloutFormat}
        base = max(RolloutFormat, key=lambda name: counts[name])
        if not counts[base]:
            return QuantMapFile(base=FULL)
        exceptions: dict[str, ModuleFormat] = {}
        for name, modules in self.groups.items():
            found = self.formats.get(modules[0])
            if found is not base:
                names = (name,) if name.endswith(".experts") else modules
                exceptions |= dict.fromkeys(names, FULL if found is None else found.value)
        return QuantMapFile(base=base.value, exceptions=exceptions)

    @cached_property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The engine's name of each module that it multiplies by → the Hugging Face modules in it, in order. Names are
        for example `model.layers.0.self_attn.qkv_proj`, `….o_proj`, `….mlp.gate_up_proj`, `….mlp.down_proj`, and
        `….mlp.experts` for all experts of a layer."""
        found: dict[str, list[str]] = {}
        for group in self.fused_groups:
            stack = _STACK_OF.get(tuple(module.rpartition(".")[2] for module in group))
            name = group[0] if stack is None else f"{group[0].rpartition('.')[0]}.{stack}"
            if match := _EXPERT.fullmatch(group[0]):
                name = match[1]
            found.setdefault(name, []).extend(group)
        return {name: tuple(modules) for name, modules in found.items()}

    @cached_property
    def weights(self) -> dict[str, tuple[tuple[str, ...], RolloutFormat | None]]:
        """Return the name of each weight that can be quantized → the names of those in its fused group, itself among
        them, and its format."""
        found: dict[str, tuple[tuple[str, ...], RolloutFormat | None]] = {}
        for group in self.fused_groups:
            names = tuple([f"{module}.weight" for module in group])
            for module, name in zip(group, names, strict=True):
                found[name] = names, self.formats.get(module)
        return found

    @property
    def rollout_format(self) -> RolloutFormat | None:
        """The quantized format of the map, or None. Raises ValueError for several: no engine serves them at once."""
        found = sorted(set(self.formats.values()))
        if len(found) > 1:
            raise ValueError(
                f"the map mixes formats ({', '.join(found)}), but an engine serves a single one beside full precision; "
                "use one format"
            )
        return found[0] if found else None

    def promoted(self, modules: Iterable[str], to: RolloutFormat | str | None = None) -> QuantMap:
        """Return a map in which the groups of `modules` have the format `to`, or are not quantized for None. `modules`
        are names of modules, which stand for their groups, or of `groups`. Raises ValueError for an unknown name."""
        chosen = None if to is None else RolloutFormat.named(to)
        formats = dict(self.formats) | dict.fromkeys(self._whole_groups(modules), chosen)
        return replace(self, formats={module: name for module, name in formats.items() if name is not None})

    def only(self, modules: Iterable[str]) -> QuantMap:
        """Return a map that quantizes only the groups of `modules` (named as in `promoted`), in their formats."""
        kept = set(self._whole_groups(modules))
        return replace(self, formats={module: name for module, name in self.formats.items() if module in kept})

    def restricted(self, modules: Iterable[str]) -> QuantMap:
        """Return the map of a share of the model, such as a pipeline stage; `modules` may include names that are not in
        the map. `quantize_state` and `fake_quantize_state` then require exactly this share. Raises ValueError when the
        share cuts through a group that the engine stacks."""
        named = frozenset(modules)
        if (known := self._shares.get(named)) is not None:
            return known
        groups = tuple(group for group in self.fused_groups if not named.isdisjoint(group))
        for group in groups:
            if not named.issuperset(group):
                raise ValueError(
                    f"{', '.join(group)} are stacked by the engine, but the share has only "
                    f"{', '.join(sorted(named & set(group)))}; keep them together"
                )
        share = (module for group in groups for module in group if module in self.formats)
        self._shares[named] = QuantMap({module: self.formats[module] for module in share}, groups)
        return self._shares[named]

    def to_hf_quantization_config(self) -> dict[str, Any] | None:
        """Return `quantization_config` for config.json, to go with the tensors of `quantize_state`.

        None when nothing is quantized, and for fp8_tensor: the folder holds plain weights, which SGLang quantizes on
        loading (--quantization fp8). An emulated format names a method that stock SGLang does not know: only our CPU
        engine loads the folder (rollout_sglang.cpu.quantized). Raises ValueError when the map mixes formats, which a
        config cannot express, and for formats that are not served.
        """
        rollout_format = self.rollout_format
        if rollout_format is not None and not rollout_format.is_served:
            raise ValueError(f"{rollout_format} is emulated by the learner only; serve fp8_block or fp8_tensor")
        if rollout_format is None or rollout_format is RolloutFormat.FP8_TENSOR:
            return None
        config: dict[str, Any] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": list(BLOCK),
        }
        if rollout_format.is_emulated:
            config = {"quant_method": EMULATED_METHOD, "format": rollout_format.value}
        ignored = list(self.ignored_layers())
        # SGLang and vLLM read the first key, transformers the second.
        return config | ({"ignored_layers": ignored, "modules_to_not_convert": ignored} if ignored else {})

    def ignored_layers(self) -> tuple[str, ...]:
        """Return the modules that could be quantized and are not, by exact name; a mixture by the name of its experts.
        Raises ValueError when the experts of a layer differ. SGLang compares names at their dots (0.5.23,
        layers/quantization/utils.py `_module_path_match`), older releases by substrings; no name is part of another."""
        names: list[str] = []
        for name, modules in self.groups.items():
            self._require_one_format(modules, "are one module of the engine")
            if modules[0] not in self.formats:
                names += (name,) if name.endswith(".experts") else modules
        return tuple(names)

    def _whole_groups(self, names: Iterable[str]) -> list[str]:
        members = {module: modules for name, modules in self.groups.items() for module in (name, *modules)}
        named = list(names)
        self._require_known(name for name in named if name not in members)
        return [module for name in named for module in members[name]]

    def _require_known(self, names: Iterable[str]) -> None:
        known = {module for group in self.fused_groups for module in group}
        for name in names:
            if name not in known:
                near = get_close_matches(name, [*known, *self.groups], n=1, cutoff=0.0)[0]
                raise ValueError(
                    f"the model has no linear layer {name!r}, the nearest name is {near}; "
                    "name layers exactly, as in the model's safetensors without .weight"
                )

    def _require_one_format(self, modules: tuple[str, ...], why: str) -> None:
        if len({self.formats.get(module) for module in modules}) > 1:
            named = (f"{module} ({self.formats.get(module, FULL)})" for module in modules[:8])
            raise ValueError(f"{', '.join(named)} {why} but differ in format; give them one")
