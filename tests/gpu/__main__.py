"""`python -m tests.gpu --out DIR`: measure on one GPU what the goals ask for, into DIR/gpu-DATE.json, .md and .log.

    phase ─▶ lanes side by side ─▶ check, part ─▶ (measured before? what it builds on failed? no time left?)
                                                            ─▶ process ─▶ figures ─▶ gpu-DATE.*

What must be right runs in lanes beside one another, what must be fast alone at the end. Called again with the same DIR
on the same machine it goes on with what is not measured yet. A crash, a hang or an error of CUDA costs the part in
which it happens. --rehearse runs the same scripts at tiny sizes on a CPU, into gpu-DATE-rehearsal.*, which measures
nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from launch.run.processes import child_environment
from pipeline.child_process import log_tail
from pipeline.data.files import write_atomically
from rollout_sglang.server.rollout_python import module_environment, rollout_python
from rollout_sglang.server.start import has_cuda
from tests.gpu.check import Figure, Figures, Goal, Scale

ROOT = Path(__file__).parents[2]
PHASES: tuple[tuple[float, tuple[tuple[str, ...], ...]], ...] = (
    (0.2, (("stack.imports", "stack.rates"), ("stack.engine",))),
    (0.6, (("te_linear", "te_layer"), ("parity.bf16",), ("parity.fp8",), ("stack.models",))),
    (1.0, (("logprob", "quantize", "training", "engine", "loop"),)),
)
"""(share of the deadline at which it ends, lanes of checks or check.part); the next begins when all lanes are done.
First what proves that the parts load; last, alone, what is measured in seconds."""
ORDER = tuple(dict.fromkeys(step.partition(".")[0] for _, lanes in PHASES for lane in lanes for step in lane))
SOURCES = ("precision", "pipeline", "megatron_bridge", "rollout_sglang", "launch", "tests/gpu")
QUERY = ("name", "driver_version", "memory.total", "clocks.sm", "power.limit")
DISTRIBUTIONS = ("torch", "triton", "transformer-engine", "megatron-core", "numpy", "transformers")
CURVE_POINTS, LOG_CHARACTERS = 10, 40_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when something that was tried now failed."""
    options = _parse(arguments)
    if not options.rehearse and not has_cuda():
        print("error: no CUDA device; run this where a GPU is, or --rehearse the scripts on a CPU", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    date, began = time.strftime("%Y-%m-%d"), time.monotonic()
    path = options.out / f"gpu-{date}{'-rehearsal' * options.rehearse}.json"
    found: dict[str, Any] = dict(date=date, rehearsal=options.rehearse, machine=_machine(), versions=_versions())
    if path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["machine"]["device"] != found["machine"]["device"]:
            ours, theirs = found["machine"]["device"], known["machine"]["device"]
            print(f"error: {path} holds figures of {theirs}, this is {ours}; choose another --out", file=sys.stderr)
            return 1
        found = known
    checks = {name: importlib.import_module(f"tests.gpu.checks.{name}") for name in ORDER}
    found.setdefault("checks", {})
    with tempfile.TemporaryDirectory(prefix="evenkeel-gpu-", ignore_cleanup_errors=True) as scratch:
        call = _Call(path, found, checks, options.scratch or Path(scratch), options.rehearse)
        for share, lanes in PHASES:
            left = [[one for step in lane for one in call.left(step, options.only or ORDER)] for lane in lanes]
            left = [lane for lane in left if lane]
            ends, count = began + share * options.deadline_s, len(left)
            with ThreadPoolExecutor(max(count, 1)) as pool, call.until_interrupted():
                list(pool.map(lambda lane, ends=ends, count=count: call.run(lane, ends, count), left))
    call.write()
    print(f"wrote {path} and {path.with_suffix('.md')}")
    tried = [one for name in options.only or ORDER for one in found["checks"].get(name, {}).values()]
    return int(any(one["status"] == "failed" for one in tried))


@dataclass
class _Call:
    """One call: what was found before and now, by lanes that share it."""

    path: Path
    found: dict[str, Any]
    checks: Mapping[str, Any]
    scratch: Path
    rehearsal: bool
    lock: threading.Lock = field(default_factory=threading.Lock)
    interrupted: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """Tell the lanes when the user interrupts: they end their parts, and the call ends."""
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted.set()
            raise

    def left(self, step: str, wanted: Sequence[str]) -> list[tuple[str, str]]:
        """(check, part) of a step that are wanted and not measured yet."""
        name, _, only = step.partition(".")
        if name not in wanted:
            return []
        parts, known = self.checks[name].PARTS, self.found["checks"].get(name, {})
        return [(name, p) for p in parts if only in ("", p) and known.get(p, {}).get("status") != "measured"]

    def run(self, lane: Sequence[tuple[str, str]], ends: float, lanes: int) -> None:
        """One part after the other, while there is time."""
        for name, part in lane:
            if self.interrupted.is_set():
                return
            if (left_s := ends - time.monotonic()) < 1.0:
                print(f"{name} {part}: no time left", flush=True)
                continue
            outcome = self._attempt(name, part, left_s) | dict(lanes=lanes)
            with self.lock:
                self.found["checks"].setdefault(name, {})[part] = outcome
            print(f"{name} {part}: {outcome['status']} in {outcome['seconds']} s {outcome['reason']}", flush=True)
            self.write()

    def _attempt(self, name: str, part: str, left_s: float) -> dict[str, Any]:
        """Run one part in a process group of its own, which dies as a whole when its deadline passes."""
        check, folder = self.checks[name], self.scratch / name
        outcome: dict[str, Any] = dict(status="not measured", reason="", seconds=0.0, commit=_commit(), figures={})
        if broken := [other for other in check.AFTER if _blocks(self.found["checks"], other, part)]:
            return outcome | dict(reason=f"builds on {', '.join(broken)}, which failed")
        folder.mkdir(parents=True, exist_ok=True)
        scale, log = Scale(rehearsal=self.rehearsal, part=part, folder=folder), folder / f"log-{part}.txt"
        for kind in ("figures", "missing"):
            scale.file(kind).unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.gpu.check", check.__name__, part, str(folder)]
        environment = child_environment() | {"PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
        began, deadline_s = time.monotonic(), min(check.DEADLINE_S, left_s)
        with log.open("wb") as output:
            child = subprocess.Popen(
                command + ["--rehearse"] * self.rehearsal,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
            while (status := child.poll()) is None and time.monotonic() - began < deadline_s:
                if self.interrupted.wait(0.1):
                    break
            reason = f"ended with {status}: {log_tail(log)}" if status else ""
            if status is None:
                reason = f"not done within {deadline_s:.0f} s; its log ends: {log_tail(log)}"
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        with self.lock:
            _keep_logs(self.path.with_suffix(".log"), f"{check.NAME} {part}", log, scale.runs)
        missing = scale.read("missing")
        outcome |= dict(seconds=round(time.monotonic() - began, 2), figures=scale.read("figures"))
        outcome["status"] = "failed" if reason else "not measured" if missing else "measured"
        return outcome | dict(reason=reason or missing.get("reason", ""))

    def write(self) -> None:
        """The files as they stand."""
        with self.lock:
            _write(self.path, self.found, self.checks)


def _blocks(outcomes: Mapping[str, Any], name: str, part: str) -> bool:
    """Whether a failure of `name` stands in the way: of that part, of the part of the same name, or of any."""
    check, _, named = name.partition(".")
    parts = outcomes.get(check, {})
    wanted = [named] if named else [part] if part in parts else list(parts)
    return any(parts[one]["status"] == "failed" for one in wanted if one in parts)


def _keep_logs(target: Path, title: str, log: Path, runs: Path) -> None:
    """Append a part's log and the ends of those of its runs (engines, learner), then remove the runs: with weights and
    checkpoints of every part a disk would fill."""
    with target.open("a", errors="replace", encoding="utf-8") as file:
        for path in (log, *sorted(runs.glob("*/logs/*.log"))):
            text = path.read_text(errors="replace")
            file.write(f"==== {title}: {path.name} ====\n{text if path == log else text[-LOG_CHARACTERS:]}\n")
    shutil.rmtree(runs, ignore_errors=True)


# ------------------------------------------------------------------------------------------------- what is written down


def _write(path: Path, found: dict[str, Any], checks: Mapping[str, Any]) -> None:
    """JSON first, then the table made from it; both are whole after every part."""
    figures = {name: _figures(found["checks"].get(name, {}), check) for name, check in checks.items()}
    found["verdicts"] = {
        name: [_row(goal, figures[name], found["checks"].get(name, {})) for goal in check.GOALS]
        for name, check in checks.items()
    }
    write_atomically(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    verdicts = [row["verdict"] for rows in found["verdicts"].values() for row in rows if row["wanted"]]
    title = "Rehearsal on a CPU: proves the scripts, measures nothing" if found["rehearsal"] else "One GPU, measured"
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in ("met", "missed", "not measured"))
    lines = [f"# {title}, {found['date']}", "", f"Goals: {counts}.", ""]
    for facts in (found["machine"], found["versions"]):
        lines += [", ".join(f"{name} {value}" for name, value in facts.items()) + ".", ""]
    for name, check in checks.items():
        parts = found["checks"].get(name, {})
        took = ", ".join(_took(part, one) for part, one in parts.items())
        text = " ".join((check.__doc__ or "").split("\n\n")[0].split())
        lines += [f"## {name}", "", f"{text} ({took or 'not run'})", ""]
        lines += _table([["what", "measured", "goal", "verdict"], *(_cells(row) for row in found["verdicts"][name])])
        for figure, value in figures[name].items():
            if isinstance(value, list) and value and isinstance(value[0], list):
                lines += [f"{figure}:", "", *_table(value)]
    write_atomically(path.with_suffix(".md"), "\n".join(lines).rstrip() + "\n")


def _took(part: str, outcome: Mapping[str, Any]) -> str:
    beside = outcome.get("lanes", 1) - 1  # a record of before has none
    among = f" beside {beside} other{'s' * (beside > 1)}" if beside else ""
    return f"{part} {outcome['status']} in {outcome['seconds']:.0f} s{among}"


def _figures(parts: Mapping[str, Any], check: Any) -> Figures:
    """Of all parts, with what follows from them."""
    together: Figures = {name: value for one in parts.values() for name, value in one["figures"].items()}
    return together | (check.derive(together) if hasattr(check, "derive") else {})


def _row(goal: Goal, figures: Figures, parts: Mapping[str, Any]) -> dict[str, str]:
    verdict, reason = goal.judge(figures)
    if verdict == "not measured" and goal.figure not in figures:
        # A figure that begins with the name of a part is that part's.
        own = [one for part, one in parts.items() if goal.figure.startswith(part)] or list(parts.values())
        reason = "; ".join(dict.fromkeys(one["reason"] for one in own if one["reason"])) or reason
    measured = "" if verdict == "not measured" else f"{_text(figures[goal.figure])} {goal.unit}".strip()
    wanted = f"{goal.wanted} {goal.unit}".strip() if goal.wanted else ""
    return dict(what=goal.what, measured=measured, wanted=wanted, verdict=verdict, reason=reason)


def _cells(row: Mapping[str, str]) -> list[str]:
    verdict = f"{row['verdict']}: {row['reason']}" if row["reason"] else row["verdict"]
    return [row["what"], row["measured"], row["wanted"], verdict]


def _text(value: Figure) -> str:
    if isinstance(value, list):
        last = min(len(value), CURVE_POINTS) - 1
        return " ".join(_text(value[round(i * (len(value) - 1) / max(last, 1))]) for i in range(last + 1))  # type: ignore[arg-type]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(rows: Sequence[Any]) -> list[str]:
    """Lines of a list of lists, the first of them the head."""
    lines = ["| " + " | ".join(" ".join(_text(one).split()).replace("|", "\\|") for one in row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:], ""]


# ------------------------------------------------------------------- which machine, versions and sources, without torch


def _machine() -> dict[str, Any]:
    """device (the GPU's name, or `CPU`), what nvidia-smi says of it, cores and memory of the host."""
    said = _said(["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]).splitlines()
    gpu = dict(zip(QUERY, map(str.strip, said[0].split(",")), strict=False)) if said else {}
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "device": gpu.pop("name", "CPU"),
        **{name.replace(".", "_"): value for name, value in gpu.items()},
        "gpus": len(said),
        "cores": os.cpu_count(),
        "host_gib": round(pages / 2**30, 1),
        "kernel": platform.release(),
    }


def _versions() -> dict[str, str]:
    """Of Python and of what learner and engine are made of; `missing` where it is not installed."""
    installed = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    engine = rollout_python() or sys.executable
    asked = "from importlib.metadata import version as v; print(v('sglang'), v('torch'), v('transformers'))"
    said = _said([engine, "-c", asked], module_environment()).split() or ["missing"] * 3
    engines = dict(zip(("sglang", "engine torch", "engine transformers"), said, strict=False))
    return {"python": platform.python_version()} | {n: installed.get(n, "missing") for n in DISTRIBUTIONS} | engines


def _commit() -> str:
    """As git describes the sources, or a digest of them where only a copy lies."""
    if known := _said(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]).strip():
        return known
    files = sorted(path for name in SOURCES for path in (ROOT / name).rglob("*.py"))
    digest = hashlib.sha256(b"".join(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() for path in files))
    return f"no git, sources {digest.hexdigest()[:12]}"


def _said(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Standard output; empty when the program is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ORDER, metavar="NAME", help=f"of {', '.join(ORDER)}")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--deadline-s", type=float, default=420.0, help="of this call (default 420)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON, the table and the log")
    parser.add_argument("--scratch", type=Path, help="models and runs of the checks (default: a temporary folder)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
