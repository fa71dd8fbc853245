"""One flipped bit in one file of a run, and what the product's readers make of it.

The run is trained once, by the real programs, and then given what only larger runs have.
"""

from __future__ import annotations

import atexit
import json
import logging
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from launch.build.components import build_tokenizer
from launch.build.engines import engine_spec
from launch.convert.folders import check_committed, checked_source
from launch.roles.engine import hold_weights
from launch.roles.lifecycle import Rendezvous
from launch.run.replay import manifest
from launch.verify.history import check_history
from pipeline.analysis.samples import Background, render_batch
from pipeline.analysis.summary import summary
from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.epochs import newest
from pipeline.data.files import is_temporary
from pipeline.data.membership import Member
from pipeline.data.quant_maps import NumberedMaps, read_quant_map
from pipeline.data.run_directory import RunDirectory, numbered_folders
from pipeline.data.store import BatchStore
from pipeline.errors import EvenKeelError, StoreError
from pipeline.ports.weights import WeightCheck
from pipeline.trainer.checkpoints import Checkpoints
from precision.controller.policy import Evidence, State
from precision.formats.quant_map import QuantMapFile
from rollout_sglang.weights.update_lease import Updates
from tests.chaos.ledger import OK, Case, Check
from tests.support.runs import evenkeel, make_model, make_recipe

FOLDER = Path("runs/chaos/flips")
KINDS: dict[str, str] = {
    "batch": r"batches/\d+\.zarr\.zip",
    "checkpoint shard": r"checkpoints/\d+/.*\.distcp",
    "checkpoint index": r"checkpoints/\d+/(\.metadata|common\.pt|metadata\.json|loop_state\.json)",
    "COMMIT": r"checkpoints/\d+/COMMIT",
    "learner logprobs": r"logprobs/\d+\.npy",
    "old logprobs": r"logprobs/\d+-old\.npy",
    "policy weights": r"policy/\d+/.*\.safetensors",
    "policy texts": r"policy/\d+/(?!weight_check|quant_map|SHA256SUMS).*\.json",
    "policy check": r"policy/\d+/(weight_check\.json|quant_map\.yaml|SHA256SUMS)",
    "model weights": r"model/.*\.safetensors",
    "model texts": r"model/.*(\.json|SHA256SUMS)",
    "metrics": r"metrics/.*",
    "events": r"events/.*",
    "spans": r"spans/.*",
    "recipe": r"recipe\.yaml",
    "format": r"FORMAT|SANDBOX",
    "published": r"policy/PUBLISHED/.*",
    "updates": r"policy/updates/.*",
    "epochs": r"epochs/.*\d{6}",
    "newest epoch": r"epochs/.*NEWEST",
    "members": r"engines/[^/]+\.json|learner\.json",
    "finished": r"finished/.*",
    "evaluations": r"evaluations/.*",
    "mismatch": r"mismatch/.*\.zarr\.zip",
    "control": r"control/.*",
    "quant maps": r"quant_maps/.*",
}
"""Kind of file → its name in a run directory."""
EXPLAINS = {"learner logprobs", "metrics", "events", "spans", "mismatch"}
"""Kinds that explain a run and decide nothing: what cannot be read is passed over, and no reader fails."""


def flips(count: int) -> Sequence[Case]:
    """The first `count`: one of each kind in turn, so that any part of them is a part of each kind."""
    names = list(KINDS)
    return [
        Check(f"{number:05d} {names[number % len(names)]}", partial(_in_own_run, number, names[number % len(names)]))
        for number in range(count)
    ]


def try_flip(run: Path, kind: str, seed: int, details: dict[str, Any]) -> str:
    """Flip a bit of a file of this kind in `run`, ask all readers, and put it back. Returns a verdict."""
    draw = random.Random(seed)
    path = draw.choice(files_of(run, kind))
    data = path.read_bytes()
    byte, bit = _place(len(data), draw), draw.randrange(8)
    details |= dict(file=str(path.relative_to(run)), byte=byte, bit=bit, bytes=len(data))
    usual, opened = _usual(run), _opened(run)  # of the whole run: both remember their first answer
    try:
        path.write_bytes(data[:byte] + bytes([data[byte] ^ 1 << bit]) + data[byte + 1 :])
        found = {name: _ask(name, run) for name in READERS if path.name in opened[name]}
    finally:
        path.write_bytes(data)
    if kind in EXPLAINS:
        failed = sorted(name for name, answer in found.items() if answer.startswith(("error: ", "fault: ")))
        return f"{failed[0]} failed: {found[failed[0]][:300]}" if failed else OK
    named = {
        name
        for name, answer in found.items()
        if "error: " in answer and answer != usual[name] and _names(answer, path, run)
    }
    others = {name for name, answer in found.items() if name not in named and answer != usual[name]}
    details["noticed_by"] = sorted(named)
    if others:
        name = min(others)
        return f"{name} was changed silently, or does not name the file: {_difference(usual[name], found[name])}"
    return OK if named else "nobody noticed"


def files_of(run: Path, kind: str) -> list[Path]:
    """The files of a kind in a run, none of them empty."""
    pattern = re.compile(KINDS[kind])
    paths = {str(path.relative_to(run)): path for path in sorted(run.rglob("*")) if path.is_file()}
    return [
        path
        for name, path in paths.items()
        if pattern.fullmatch(name) and not any(map(is_temporary, path.parts)) and path.stat().st_size
    ]


def _place(num_bytes: int, draw: random.Random) -> int:
    """Beginnings and ends hold what formats are made of: headers, lengths, checksums, padding."""
    part = draw.random()
    if part < 0.3:
        return draw.randrange(min(num_bytes, 256))
    if part < 0.6:
        return num_bytes - 1 - draw.randrange(min(num_bytes, 256))
    return draw.randrange(num_bytes)


def _in_own_run(number: int, kind: str, details: dict[str, Any]) -> str:
    return try_flip(_own_run(), kind, number, details)


@cache
def _own_run() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="evenkeel-flips-"))  # whoever is killed leaves a flipped bit there
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(shutil.copytree(real_run(FOLDER), folder / "flips"))


@cache
def _usual(run: Path) -> dict[str, str]:
    """What every reader says of the whole run."""
    answers = {name: _ask(name, run) for name in READERS}
    wrong = {name: answer for name, answer in answers.items() if answer.startswith(("error: ", "fault: "))}
    assert not wrong, wrong
    return answers


@cache
def _opened(run: Path) -> dict[str, set[str]]:
    """Names of the files that each reader opens: a flip in another file is none of its business."""
    opened: dict[str, set[str]] = {name: set() for name in READERS}
    reading: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if reading and event == "open" and isinstance(arguments[0], str | Path):
            opened[reading[0]].add(Path(arguments[0]).name)

    sys.addaudithook(note)
    for name in READERS:
        reading[:] = [name]
        _ask(name, run)
    reading.clear()
    return opened


def _ask(name: str, run: Path) -> str:
    try:
        return READERS[name](run)
    except EvenKeelError as error:
        return f"error: {error}"
    except Exception as error:  # noqa: BLE001 - a traceback, for a user
        return f"fault: {type(error).__name__}: {error}"


def _names(answer: str, path: Path, run: Path) -> bool:
    """The file; or its folder, as a damaged FORMAT is a run of another version; or where it is linked to."""
    return str(path) in answer or path.name in answer or (path.parent != run and str(path.parent) in answer)


def _difference(usual: str, found: str) -> str:
    if found.startswith(("error: ", "fault: ")):
        return found[:300]
    place = next((i for i, (a, b) in enumerate(zip(usual, found, strict=False)) if a != b), min(len(usual), len(found)))
    return f"…{usual[max(0, place - 30) : place + 60]!r} became …{found[max(0, place - 30) : place + 60]!r}"


def history(path: Path) -> str:
    """`evenkeel verify history`, which reads every file."""
    found = check_history(path)
    if found["damaged"]:
        raise StoreError("; ".join(found["damaged"]))
    return json.dumps(found, sort_keys=True)


def resume(path: Path) -> str:
    """What a learner and a collector read when they are started again."""
    run = RunDirectory(path)
    recipe = run.recipe()
    state = Checkpoints(run.checkpoints, recipe.checkpoint.keep)._newest()
    steps = range(recipe.run.steps)
    old = [None if (kept := run.old_logprobs(step)) is None else kept.tolist() for step in steps]
    control = ControlFiles(run.control, run.fence)
    maps = NumberedMaps(run.quant_maps, run.fence)
    numbers = [int(one.stem) for one in sorted(run.quant_maps.glob("*.yaml"))]
    said = (recipe.to_yaml(), run.published_version(), run.is_finished(), run.sandbox(), state, old)
    return repr((*said, control.newest(), control.decisions(), [maps.read(number) for number in numbers]))


def show(path: Path) -> str:
    """`evenkeel runs show`, and what a report is drawn from."""
    return repr(summary(path))


def replay(path: Path) -> str:
    """What `evenkeel train --replay` compares its weights with."""
    return json.dumps(manifest(RunDirectory(path)), sort_keys=True)


def trajectories(path: Path) -> str:
    """`evenkeel trajectories show`, of every batch."""
    run = RunDirectory(path)
    tokenizer = build_tokenizer(run.recipe())
    store = BatchStore(run.batches)
    background, lines = Background(path), list[str]()
    for index in store.committed():
        learner = run.learner_logprobs(index)
        lines += render_batch(store.read(index, None), tokenizer, background, learner_logprobs=learner)
    return "\n".join(lines)


def engine_start(path: Path) -> str:
    """What an engine reads when it is started, and a fleet when it verifies that one."""
    run = RunDirectory(path)
    recipe = run.recipe()
    spec = hold_weights(run, 0, 0, 1, lambda: engine_spec(run, recipe, 0, 1, None, log=None))
    try:
        folder = run.policy_directory(spec.version)
        held = sorted(one.name for one in spec.model.iterdir())
        return repr((spec, held, WeightCheck.load(folder, int(folder.name)), read_quant_map(folder)))
    finally:
        shutil.rmtree(spec.model, ignore_errors=True)


def roles(path: Path) -> str:
    """What roles read of one another. An engine whose announcement is damaged is passed over with a warning: it
    announces itself again."""
    run, warnings = RunDirectory(path), list[logging.LogRecord]()
    watch = logging.Handler()
    watch.emit = warnings.append  # type: ignore[method-assign]
    logging.getLogger("pipeline.data.membership").addHandler(watch)
    updates = Updates(run.updates)
    epochs = {one.name: newest(one) for one in sorted((path / "epochs").iterdir())}
    members = run.membership()
    said = (epochs, members.engines(), members.router(), updates.given(), updates.under_way(), updates.newest())
    logging.getLogger("pipeline.data.membership").removeHandler(watch)
    if warnings:
        raise StoreError("; ".join(warning.getMessage() for warning in warnings))
    return repr((*said, Rendezvous.read(path / "learner.json")))


def convert(path: Path) -> str:
    """What `evenkeel convert` checks of checkpoints and of a model."""
    run = RunDirectory(path)
    for step in numbered_folders(run.checkpoints):
        check_committed(run.checkpoints / f"{step:06d}")
    return repr(checked_source(run.model))


READERS: dict[str, Callable[[Path], str]] = {
    reader.__name__: reader for reader in (history, resume, show, replay, trajectories, engine_start, roles, convert)
}


STEPS = 4


def real_run(folder: Path) -> Path:
    """Its directory; trained unless an earlier call did."""
    folder = folder.absolute()
    run = folder / "runs" / "flips"
    if not (folder / "COMPLETE").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        recipe = make_recipe(
            folder,
            make_model(folder / "model"),
            "flips",
            run=dict(name="flips", root=str(folder / "runs"), steps=STEPS),
            schedule=dict(kind="staged", updates_per_stage=2),
            rollout=dict(
                precision="fp8_block", prompts_per_batch=4, group_size=4, max_new_tokens=12, context_tokens=64
            ),
            evaluation=dict(every=2, prompts=4, samples=2),
        )
        done = evenkeel("train", recipe)
        assert done.returncode == 0, done.stderr
        complete(run)
        (folder / "COMPLETE").touch()
    return run


def complete(path: Path) -> None:
    """Write, by the product's own writers, what this run has not: old log-probabilities, the records and the map of a
    controller, members and a rendezvous."""
    run = RunDirectory(path)
    for step in range(2):
        learner = run.learner_logprobs(step)
        assert learner is not None
        run.write_logprobs(step, np.asarray(learner, np.float32), old=True)
    record = ControlRecord(step=0, evidence=Evidence(step=0, loss=0.25), state=State())
    ControlFiles(run.control, run.fence).create(record)
    NumberedMaps(run.quant_maps, run.fence).write(1, QuantMapFile(base="fp8_block"))
    run.membership().announce(Member(0, "http://127.0.0.1:30000", started=1))
    run.membership().announce_router("http://127.0.0.1:30001")
    Rendezvous(epoch=1, host="127.0.0.1", port=29500, nodes=1).write(path / "learner.json")
