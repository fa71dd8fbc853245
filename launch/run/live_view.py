"""Show what a run is doing: a live view on a terminal, plain lines elsewhere.

The view reads only new lines of the run's metrics and events, and writes to stderr; stdout stays free for results.
"""

from __future__ import annotations

import re
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch import terminal
from pipeline.analysis.run_log import number
from pipeline.analysis.summary import (
    WINDOW_STEPS,
    bottleneck,
    count,
    decimal,
    duration,
    formats_differ,
    percent,
    phase_shares,
    time_shares,
    unsolved_line,
    whole_stages,
)
from pipeline.background import notice_line
from pipeline.config.recipe import Recipe
from pipeline.data.event_log import LogTail
from precision.mismatch.alarms import Alarm, alarms
from precision.text import one_line

ENGINE_EVENTS = ("joined", "admitted", "quarantined", "left")
_STYLES = {"admitted": "green", "joined": "yellow", "quarantined": "bold red", "starting again": "yellow"}
PHASE_STYLES = {
    "wait": "bright_black",
    "logprobs": "cyan",
    "update": "magenta",
    "publish": "yellow",
    "record": "green",
    "save": "green",
}
BAR_CELLS = 40
SAMPLE_STEPS = 10
SAID = (
    "evaluated",
    "restarted",
    "controlled",
    "no_progress",
    "reward_failed",
    "unsolved",
    "teacher_failed",
    "episode_failed",
    "chat_format",
    "skipped",
    *ENGINE_EVENTS,
)
"""Kinds of events that are printed where there is no terminal."""


@dataclass(frozen=True)
class Shown:
    """An engine's state by its newest event."""

    state: str
    reason: str
    since: float
    """Time of the state's first event, in seconds since 1970."""


@dataclass
class Progress:
    """The state that the view shows, updated by `take_metrics` and `take_event`."""

    steps: int
    stage: int = 1
    """Steps in a stage of a staged run."""
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS + 1))
    """The newest metrics lines of one start of the learner: the time between two starts is part of no step."""
    start: str = ""
    last: dict[str, Any] = field(default_factory=dict)
    num_steps: int = 0
    step_s: float | None = None
    """Mean seconds from the end of one step to the end of the next."""
    tokens_per_s: float | None = None
    """Trained response tokens a second over the recent steps."""
    pass_at_1: str = "–"
    restarts: int = 0
    control: dict[str, Any] | None = None
    """The latest decision of the ESS controller."""
    sample: dict[str, Any] | None = None
    reward_failed: dict[str, Any] | None = None
    """The first sample of the run whose verifier failed."""
    samples_failed: float = 0.0
    """Number of trained samples without a reward."""
    unsolved: dict[str, Any] | None = None
    """Event that no sample of the first batches was solved; None once a sample is."""
    teacher_failed: dict[str, Any] | None = None
    """The first group of the run that the teacher of a distillation did not score."""
    samples_untaught: float = 0.0
    """Number of trained samples that the teacher did not score."""
    starting: dict[str, float] = field(default_factory=dict)
    """Started process that is not up yet → time of its start."""
    issued: int = -1
    """The newest batch that engines were asked for."""
    committed: int = -1
    quantized: bool = False
    """Whether learner and engines compute in different formats, at least one of them quantized."""
    alarms: list[Alarm] = field(default_factory=list)
    engines: dict[int, Shown] = field(default_factory=dict)
    waits: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Waiting process → the latest notice of its unfinished wait."""

    def take_metrics(self, line: dict[str, Any], start: str = "") -> None:
        """Take in the metrics line of a step; `start` is the learner's start that wrote it."""
        if start != self.start:
            self.recent.clear()
        self.start, self.last, self.num_steps = start, line, int(line["step"]) + 1
        self.recent.append(line)
        self.step_s = self.tokens_per_s = None
        first, steps = self.recent[0], line["step"] - self.recent[0]["step"]
        if steps > 0:
            self.step_s = float(line["time"] - first["time"]) / float(steps)
        if self.step_s is not None and self.step_s > 0:
            tokens = [number(one, "num_tokens") or 0.0 for one in list(self.recent)[1:]]
            self.tokens_per_s = sum(tokens) / len(tokens) / self.step_s
        self.samples_failed += number(line, "verifier_failures") or 0.0
        if number(line, "solve_rate"):
            self.unsolved = None
        self.samples_untaught += number(line, "teacher_failures") or 0.0
        self.alarms = alarms(line, quantized=self.quantized)

    def take_event(self, event: dict[str, Any]) -> None:
        kind, process, reason = event.get("kind"), str(event.get("process", "")), str(event.get("reason") or "")
        match kind:
            case "evaluated":
                self.pass_at_1 = f"{percent(number(event, 'pass_at_1'))} (v{event.get('version')})"
            case "restarted":
                self.restarts += 1
                if (index := process.removeprefix("engine-")).isdecimal():
                    self.engines[int(index)] = Shown("starting again", reason, float(event["time"]))
            case "controlled":
                self.control = event
            case "sampled":
                self.sample = event
            case "reward_failed":
                self.reward_failed = self.reward_failed or event
            case "unsolved":
                self.unsolved = event
            case "teacher_failed":
                self.teacher_failed = self.teacher_failed or event
            case "no_progress":
                self.waits |= {event["who"]: event}
                if event["over"]:
                    del self.waits[event["who"]]
            case "issued":
                self.issued = event["batch"]
            case "committed":
                self.committed = event["batch"]
            case "started":
                if process == "collector":
                    self.engines.clear()  # the collector reports all engines anew
                if re.fullmatch(r"learner|collector|engine-\d+", process):
                    self.starting[process] = event["time"]
            case "environment" if event.get("role") in ("learner", "collector"):
                self.starting.pop(event["role"], None)
            case "joined" | "admitted" | "quarantined" | "left":
                if kind == "joined":
                    self.starting.pop(f"engine-{event.get('engine')}", None)
                engine, at = int(event["engine"]), float(event["time"])
                known = self.engines.get(engine)
                again = known is not None and known.state == "starting again"  # outranks `left` and `quarantined`
                if kind == "left" and not again:
                    self.engines.pop(engine, None)
                elif not (again and kind in ("left", "quarantined")):
                    since = known.since if known is not None and known.state == kind else at
                    self.engines[engine] = Shown(str(kind), reason, since)

    def doing(self) -> str:
        """Return what the run is doing, and for how long."""
        if self.starting:
            return f"starting {', '.join(sorted(self.starting))} ({time.time() - min(self.starting.values()):.0f} s)"
        done = self.num_steps
        if done >= self.steps:
            return "all steps are trained; the last version is evaluated, then everything ends"
        what = ""
        if self.committed >= done:
            what = f": the learner trains on batch {done}"
        elif self.issued >= done:
            what = f": engines answer batch {done}"
        since = f" ({time.time() - self.last['time']:.0f} s)" if self.recent else ""
        return f"step {done + 1} of {self.steps}{what}{since}"


class LiveView:
    """A view of a run, as a context manager; the supervisor refreshes it several times a second.

    On a terminal it redraws one block. Elsewhere it prints a step every EVERY_S, or each step if steps take over SLOW_S
    (launch.terminal); a sample every SAMPLE_STEPS; each event of a kind in SAID; each begin and end of an alarm; and,
    after EVERY_S without a line, what the run is doing. Lines from before its start are read but not printed.
    """

    def __init__(
        self,
        run_dir: Path,
        steps: int,
        *,
        stage: int = 1,
        quantized: bool = False,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console(stderr=True)
        recent = deque[dict[str, Any]](maxlen=whole_stages(WINDOW_STEPS, stage) + 1)
        self.progress = Progress(steps, stage, recent, quantized=quantized)
        self._metrics, self._events = LogTail(run_dir, "metrics"), LogTail(run_dir, "events")
        self._said: tuple[int, float] | None = None
        """The newest printed step, and when it ended."""
        self._sampled = -SAMPLE_STEPS
        """The step at which the newest sample was printed."""
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    @classmethod
    def of_run(cls, run_dir: Path, recipe: Recipe) -> Self:
        stage = recipe.build_schedule().updates_per_stage
        return cls(run_dir, recipe.run.steps, stage=stage, quantized=formats_differ(recipe))

    def __enter__(self) -> Self:
        self._take(says=False)
        self.progress.starting.clear()  # starts of earlier supervisors
        terminal.note_line(block=True)
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with suppress(OSError):  # a file system that does not answer must not hide how the run has ended
                self.refresh()
        finally:
            if self._live is not None:
                self._live.stop()

    def refresh(self) -> None:
        self._take(says=self._live is None)
        if self._live is not None:
            self._live.update(render(self.progress), refresh=True)

    def _take(self, *, says: bool) -> None:
        for _, event in self._events.new_lines():
            self.progress.take_event(event)
            if says and event.get("kind") in SAID:
                self._say(event_line(event))
        for start, line in self._metrics.new_lines():
            before = {alarm.rule.name: alarm for alarm in self.progress.alarms}
            self.progress.take_metrics(line, start)
            if says:
                now, step = {alarm.rule.name: alarm for alarm in self.progress.alarms}, self.progress.num_steps - 1
                for alarm in (now[name] for name in now if name not in before):
                    self._say(f"alarm at step {step}: {alarm.text}; {alarm.rule.to_do}")
                for alarm in (before[name] for name in before if name not in now):
                    self._say(f"no longer at step {step}: {alarm.text}")
                done, ended, ends = self.progress.num_steps, line["time"], self.progress.steps
                before_it = self._said
                if before_it and done < ends and not terminal.is_due(done - before_it[0], ended - before_it[1]):
                    continue
                self._said = done, ended
                self._say(step_line(self.progress))
                if self.progress.sample is not None and (done - self._sampled >= SAMPLE_STEPS or done == ends):
                    self._sampled = done
                    self._say(sample_line(self.progress.sample))
        if says and time.monotonic() - terminal.line_at >= terminal.EVERY_S:
            self._say(self.progress.doing())

    def _say(self, text: str) -> None:
        terminal.note_line()
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def render(progress: Progress) -> RenderableType:
    last, steps = progress.last, progress.num_steps
    left = "" if progress.step_s is None else f"{duration(progress.step_s * max(0, progress.steps - steps))} left"
    head = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=progress.steps, completed=steps, width=BAR_CELLS)
    head.add_row(Text(progress.doing(), style="bold"), bar, Text(left, style="dim"))
    lag = f"{decimal(number(last, 'lag_mean'))}, at most {decimal(number(last, 'lag_max'))}"
    rows = (
        {
            "pass@1": progress.pass_at_1,
            "reward": decimal(number(last, "reward_mean")),
            "entropy": decimal(number(last, "entropy")),
            "tokens/s": count(progress.tokens_per_s),
        },
        {
            "ESS": decimal(number(last, "ess")),
            "lag": lag,
            "grad norm": decimal(number(last, "grad_norm")),
            "restarts": str(progress.restarts),
        },
    )
    numbers = Table.grid(padding=(0, 3))
    for row in rows:
        numbers.add_row(*(Text.assemble((f"{name} ", "dim"), value) for name, value in row.items()))
    blocks: list[RenderableType] = [head, Text(), numbers]
    if any(engine.state != "admitted" for engine in progress.engines.values()):
        table = Table.grid(padding=(0, 2))
        for index, engine in sorted(progress.engines.items()):
            if engine.state != "admitted":
                since = Text(time.strftime("since %H:%M:%S", time.localtime(engine.since)), style="dim")
                state = Text(engine.state, style=_STYLES[engine.state])
                table.add_row(f"engine {index}", state, since, Text(engine.reason))
        blocks += [Text(), table]
    no_reward = f"{progress.samples_failed:.0f} samples of {steps} steps without a reward; the first: "
    untaught = f"{progress.samples_untaught:.0f} samples of {steps} steps without the teacher's scores; "
    notable = (("", progress.control), (no_reward, progress.reward_failed), ("", progress.unsolved))
    for before, event in (*notable, (untaught, progress.teacher_failed)):
        if event is not None:
            blocks += [Text(), Text(before + event_line(event), style="yellow")]
    if progress.sample is not None:
        blocks += [Text(), Text(sample_line(progress.sample), style="dim")]
    if progress.waits:
        blocks += [Text(), *(Text(event_line(wait), style="yellow") for wait in progress.waits.values())]
    if progress.alarms:
        blocks.append(Text())
    for alarm in progress.alarms:
        blocks.append(Text.assemble(("alarm ", "bold red"), (alarm.text, "red"), (f"; {alarm.rule.to_do}", "dim")))
    if shares := phase_shares(progress.recent, stage=progress.stage):
        verdict = bottleneck(time_shares(progress.recent, stage=progress.stage))
        shares = {phase: share for phase, share in shares.items() if share > 0}
        bar_of_phases = Text()
        for phase, share in shares.items():
            bar_of_phases.append("█" * round(share * BAR_CELLS), PHASE_STYLES[phase])
        for phase, share in shares.items():
            value = f"{share * progress.step_s:.2f} s" if progress.step_s is not None else percent(share)
            bar_of_phases.append(f"  {phase} ", PHASE_STYLES[phase]).append(value)
        blocks += [Text(), bar_of_phases, Text(verdict, style="italic")]
    return Padding(Group(*blocks), (1, 1))


def step_line(progress: Progress) -> str:
    last = progress.last
    shares = phase_shares(progress.recent, stage=progress.stage)
    slowest = max(shares, key=shares.__getitem__) if shares else None
    parts = [
        f"step {progress.num_steps}/{progress.steps}",
        f"reward {decimal(number(last, 'reward_mean'))}",
        f"pass@1 {progress.pass_at_1}",
        f"ESS {decimal(number(last, 'ess'))}",
        f"lag {decimal(number(last, 'lag_mean'))}",
        f"entropy {decimal(number(last, 'entropy'))}",
        f"{count(progress.tokens_per_s)} tokens/s",
    ]
    return ", ".join([*parts, f"mostly {slowest} ({percent(shares[slowest])})"] if slowest else parts)


def sample_line(event: dict[str, Any]) -> str:
    """Return a sample as plain text, without terminal control characters."""
    parts = ", ".join(f"{name} {value:g}" for name, value in event["reward_parts"].items())
    reward = "no reward" if event["reward"] is None else f"reward {event['reward']:g}"
    prompt, response = (one_line(event[name], length) for name, length in (("prompt", 120), ("response", 240)))
    end = "" if event["finish"] == "stop" else f" [{event['finish']}]"
    if "turns" in event:
        end = f" [{event['turns']} turns, {event['tool_calls']} tool calls, {event['stopped']}]"
    return one_line(
        f"a sample of batch {event['batch']}, {reward}{f' ({parts})' if parts else ''}: {prompt} ▸ {response}{end}"
    )


def event_line(event: dict[str, Any]) -> str:
    """Return an event of a kind in SAID as plain text, without terminal control characters."""
    match event["kind"]:
        case "no_progress":
            line = notice_line(event)
        case "reward_failed":
            line = f"a sample has no reward ({event['reason']}): {event['detail']}"
        case "unsolved":
            line = unsolved_line(event)
        case "teacher_failed":
            line = f"the teacher did not score a group ({event['reason']}): {event['detail']}"
        case "episode_failed":
            then = "it is run once more" if event["again"] else "its group is given up"
            line = f"an episode of group {event['group']} failed, {then}: {event['reason']}"
        case "chat_format":
            line = f"episodes branch, since the chat template does not extend a conversation: {event['why']}"
        case "skipped":
            line = f"step {event['step']} is skipped: its batch was lost by damage"
        case kind if kind in ENGINE_EVENTS:
            reason = event.get("reason")
            line = f"engine {event['engine']} {kind}{f': {reason}' if reason else ''}"
        case "controlled":
            line = f"controller after step {event['step']}: {event['rung']}. {event['because']}"
        case "restarted":
            line = f"restarted {event.get('process')}: {event.get('reason', 'no reason given')}"
        case _:
            curve = event.get("pass_at_k") or {}
            k = max((int(k) for k in curve), default=1)
            many = f", pass@{k} {percent(number(curve, str(k)))}" if k > 1 else ""
            low, high = (percent(number(event, f"pass_at_1_{end}")) for end in ("low", "high"))
            reward = f", reward {decimal(number(event, 'reward_mean'))}" if "reward_mean" in event else ""
            failed = f", {unjudged} samples without a reward" if (unjudged := event.get("verifier_failures")) else ""
            score = f"pass@1 {percent(number(event, 'pass_at_1'))} ({low} to {high}){many}{reward}"
            line = f"version {event['version']}: {score}{failed}"
    return one_line(line)
