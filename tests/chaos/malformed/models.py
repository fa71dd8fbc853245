"""HF model folders: config.json, tokenizers, indexes and safetensors headers that are something else."""

from __future__ import annotations

import json
import random
import shutil
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from launch.build.components import build_tokenizer
from launch.convert.folders import checked_source
from launch.convert.inspect import inspect_folder
from pipeline.config.loader import recipe_from
from pipeline.errors import EvenKeelError
from pipeline.tasks.tokenizer import Tokenizer
from tests.chaos.malformed.mutations import judged, judged_line, mutated_bytes, mutated_data
from tests.support.runs import evenkeel

COUNT = 1500
IN_MAKE_TEST = 40
_JSON = ("config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json",
"manifest.json")  # fmt: skip


def prepare() -> None:
    """Makes the folder that the tries change."""
    _good()


@cache
def _good() -> Path:
    """A random model of one layer, with an index and a manifest. Lives as long as the process."""
    import atexit

    from launch.convert.new_model import new_model

    root = Path(tempfile.mkdtemp(prefix="evenkeel-models-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    folder = root / "model"
    new_model(folder, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=16)
    header = _header(folder / "model.safetensors")
    names = [name for name in header if name != "__metadata__"]
    index = dict(metadata=dict(total_size=1), weight_map=dict.fromkeys(names, "model.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    manifest = {name: dict(shape=header[name]["shape"], sha256="0" * 64) for name in names}
    (folder / "manifest.json").write_text(json.dumps(dict(tensors=manifest)))
    return folder


def attempt(seed: int, folder: Path) -> str:
    """Change one file of a model folder, and read the folder as commands do."""
    rng = random.Random(f"models/{seed}")
    model = folder / "model"
    shutil.copytree(_good(), model)
    _change(rng, model)
    for read in (_inspect, _plan, _checked, _tokenized):
        verdict = judged(lambda read=read: read(model), EvenKeelError, names=(model, "config.json"))
        if verdict != "ok":
            return f"{read.__name__}: {verdict}"
    if seed % 20 == 0:
        done = evenkeel("convert", "inspect", model)
        if done.returncode not in (0, 1):
            return f"convert inspect: status {done.returncode}: {done.stderr[:300]!a}"
        return "ok" if done.returncode == 0 else judged_line(done.stderr.removesuffix("\n"), (model, "config.json"))
    return "ok"


def _inspect(model: Path) -> None:
    json.dumps(inspect_folder(model))


def _checked(model: Path) -> None:
    checked_source(model)


def _plan(model: Path) -> None:
    from launch.plan.planner import Machine, make_plan

    recipe = model.parent / "recipe.yaml"
    recipe.write_text(f"run: {{name: a, steps: 4}}\nmodel: {{path: {model}}}\ntask: {{name: sort_digits}}\n")
    try:
        make_plan(recipe, [], Machine(gpus=2, gpu_gib=80.0), {})
    finally:
        recipe.unlink()


def _tokenized(model: Path) -> None:
    data = dict(run=dict(name="a", steps=4), model=dict(path=str(model)), task=dict(name="sort_digits"))
    tokenizer: Tokenizer = build_tokenizer(recipe_from(data, source="test"))
    tokenizer.decode(tokenizer.encode("123"), special=True)
    tokenizer.conversation([dict(role="user", content="1")])


def _change(rng: random.Random, model: Path) -> None:
    how = rng.random()
    if how < 0.6:
        path = model / rng.choice(_JSON)
        if rng.random() < 0.65:
            data = mutated_data(rng, _richer(rng, path))
            path.write_bytes(json.dumps(data).encode("utf-8", "surrogatepass"))
        else:
            path.write_bytes(mutated_bytes(rng, path.read_bytes()))
    elif how < 0.9:
        _change_header(rng, model / "model.safetensors")
    else:
        _replace_file(rng, model / rng.choice((*_JSON, "model.safetensors")))


def _richer(rng: random.Random, path: Path) -> Any:
    data = json.loads(path.read_text(encoding="utf-8"))
    if path.name == "config.json" and rng.random() < 0.6:
        more: dict[str, Any] = dict(
            rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                              original_max_position_embeddings=8192),
            rope_parameters=dict(rope_type="default", rope_theta=1e6),
            quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic"),
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True, sliding_window=None,
            eos_token_id=[1, 2], decoder_sparse_step=1, mlp_only_layers=[],
        )  # fmt: skip
        for key in rng.sample(sorted(more), rng.randint(1, 5)):
            data[key] = more[key]
        if "num_experts" in data and rng.random() < 0.7:
            data["architectures"] = ["Qwen3MoeForCausalLM"]
    if path.name == "tokenizer_config.json":
        data["chat_template"] = rng.choice((
            "{{ messages[0].content }}", "{% for m in messages %}{{ m.content }}{% endfor %}", "{{ 1/0 }}",
            "{{ ''.__class__ }}",
            "{% for i in range(10**9) %}x{% endfor %}", "{{ 'a' * 10**10 }}", "{{ messages[9].x.y }}", "{% if",
            "{{ raise_exception('no\nway') }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 9**9**9 }}",
        ))  # fmt: skip
    return data


def _header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    return header


def _change_header(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, body = data[8 : 8 + size], data[8 + size :]
    match rng.randrange(5):
        case 0:
            header = json.dumps(mutated_data(rng, json.loads(header))).encode("utf-8", "surrogatepass")
        case 1:
            header = mutated_bytes(rng, header)
        case 2:
            size = rng.choice((0, 1, size - 1, size + 1, len(data), 2**31, 2**63, 2**64 - 1))
            path.write_bytes(struct.pack("<Q", size) + header + body)
            return
        case 3:
            body = body[: rng.randint(0, len(body))]
        case _:
            parsed = json.loads(header)
            name = rng.choice([name for name in parsed if name != "__metadata__"])
            parsed[rng.choice(("a\nb", "\x1b[2J", "x" * 5000, "model.layers.99999999999999.x", ""))] = parsed.pop(name)
            header = json.dumps(parsed).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + body)


def _replace_file(rng: random.Random, path: Path) -> None:
    path.unlink()
    match rng.randrange(6):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to(path)
        case 2:
            path.write_bytes(b"")
        case 3:
            path.write_bytes(rng.randbytes(1000))
        case 4:
            path.symlink_to("/proc/self/nowhere")
        case _:
            pass
