"""One flipped bit in one file, and what the product's readers make of it."""

from __future__ import annotations

import atexit
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from pipeline.data.files import is_temporary
from pipeline.errors import EvenKeelError
from tests.chaos.flips.readers import READERS
from tests.chaos.ledger import OK, Case, Check

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
    from tests.chaos.flips.runs import real_run

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
