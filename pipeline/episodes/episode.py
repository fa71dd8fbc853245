"""Run one episode: an environment, an agent or the tools alone around the policy, within budgets.

    prompt ─▶ messages ─▶ Session.turn ─▶ row of tokens ─▶ engine ─▶ tokens, recorded ─▶ message ─┐
                  ▲                                                                               │
                  └── environment.step · tools · the agent, by its client or the gateway ◀────────┘

The three ways in differ in who holds the conversation. All turns go through one Session, which records each before its
message is handed out. A fault of environment or agent is no reward of 0: the episode is run once more, and then its
group is given up. A budget that is used up ends an episode, which is scored as it stands.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pipeline import spans
from pipeline.child_process import dying_with_this, with_own_python
from pipeline.data.batch import Completion, EpisodeFacts, Prompt, Row, StopReason
from pipeline.data.event_log import EventLog
from pipeline.episodes.chat_format import ChatFormat, Message
from pipeline.episodes.host import EpisodeFailedError, EpisodeHost, HostDiedError, Pipe
from pipeline.episodes.rows import EpisodeRows
from pipeline.errors import EvenKeelError
from pipeline.rewards.messages import is_number
from precision.text import one_line

if TYPE_CHECKING:
    from pipeline.episodes.tools import Tools, Workspace
    from rollout_sglang.gateway.server import Gateway

_LEFT_OUT = "\n[… {count} bytes left out]"
_MOST_OUTPUT_BYTES = 1 << 20
"""Bytes of an agent's standard output, of which the last line may hold its reward."""
_MOST_DEATHS = 3
"""Deaths of the process of all episodes that are no failure of an episode; it may be the one that kills it."""
Ask = Callable[[tuple[int, ...], int], Awaitable[Completion]]
"""Asks the engines to continue tokens by at most so many."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What an episode may use."""

    turns: int
    new_tokens: int
    """Sampled tokens of a turn."""
    sampled_tokens: int
    """Sampled tokens of all turns."""
    context_tokens: int
    """Tokens of a row."""
    tool_calls: int
    seconds: float
    """Time outside the policy: in tools, environment and agent. Waits for engines do not count."""
    step_s: float
    """Longest time of one step of an environment; then it counts as stuck."""
    observation_bytes: int
    """UTF-8 bytes of a message of a tool or environment; the rest is left out."""


class EpisodeEndedError(Exception):
    """The episode has ended, and no more turns are sampled."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"the episode has ended: {reason.name.lower()}")
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A sampled turn."""

    message: Message
    finish: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    sampled_tokens: int


class Session:
    """One episode as its agent sees it: it gives messages, and gets the policy's next."""

    def __init__(self, chat: ChatFormat, ask: Ask, budget: Budget) -> None:
        self._chat, self.rows = chat, EpisodeRows(chat)
        self.stopped: StopReason | None = None
        self.turns = self.sampled_tokens = self.tool_calls = 0
        self.last: Message | None = None
        """The newest turn."""
        self._ask, self._budget = ask, budget
        self._left_s = budget.seconds
        self._since: float | None = None
        """The time since when the agent, not the policy, has been at work; None: the policy is."""
        self._asking = 0
        self._over = asyncio.Event()
        """Set when the agent has had its time, or the engines failed for good."""
        self._error: EvenKeelError | None = None
        self._clock: asyncio.TimerHandle | None = None

    async def turn(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Turn:
        """Sample the policy's message after `messages`, and record it. Raises EpisodeEndedError when a budget is used
        up, ValueError for messages that the chat format cannot render, and what the engines raise."""
        if self.stopped is not None:
            raise EpisodeEndedError(self.stopped)
        self.check_tool_calls()
        budget = self._budget
        if self.turns + self._asking >= budget.turns:
            raise self._ended(StopReason.TURNS)
        context = self.rows.context([dict(one) for one in messages], tools)
        if (room := budget.context_tokens - len(context.tokens)) <= 0:
            raise self._ended(StopReason.CONTEXT)
        if (left := budget.sampled_tokens - self.sampled_tokens) <= 0:
            raise self._ended(StopReason.TOKENS)
        self._stop_clock()
        self._asking += 1
        try:
            completion = await self._ask(context.tokens, min(budget.new_tokens, room, left))
        except EvenKeelError as error:  # no fault of the agent, and not for it to catch
            self._error = error
            self._over.set()
            raise
        finally:
            self._asking -= 1
            self.start_clock()
        if self.stopped is not None:
            raise EpisodeEndedError(self.stopped)
        self.turns, self.sampled_tokens = self.turns + 1, self.sampled_tokens + len(completion.tokens)
        message = self.last = self.rows.sampled(context, completion)
        finish: Literal["stop", "length", "tool_calls"] = "length" if completion.finish == "length" else "stop"
        if calls := len(message.get("tool_calls") or ()):
            finish = "tool_calls"
            self.tool_calls += calls  # whoever answers them
        return Turn(
            message=message,
            finish=finish,
            prompt_tokens=len(context.tokens),
            sampled_tokens=len(completion.tokens),
        )

    def count(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """Return the number of tokens that the engine would read for a turn after `messages`."""
        return len(self.rows.context([dict(one) for one in messages], tools).tokens)

    def _ended(self, reason: StopReason) -> EpisodeEndedError:
        self.stopped = self.stopped if self.stopped is not None else reason
        return EpisodeEndedError(self.stopped)

    def check_tool_calls(self) -> None:
        """Raise EpisodeEndedError when the policy has called more tools than it may."""
        if self.tool_calls > self._budget.tool_calls:
            raise self._ended(StopReason.TOOL_CALLS)

    def observed(self, text: str) -> str:
        """Return the text of a tool or environment, cut to its budget, without characters that have no token."""
        data, most = text.encode(errors="replace"), self._budget.observation_bytes
        if len(data) > most:
            text = data[:most].decode(errors="ignore") + _LEFT_OUT.format(count=len(data) - most)
        return self._chat.readable(text)

    def start_clock(self) -> None:
        """Let the time of the agent run, unless the policy is still asked."""
        if self._asking == 0 and self._since is None:
            self._since = time.monotonic()
            loop = asyncio.get_running_loop()
            self._clock = loop.call_later(max(0.0, self._left_s), self._over.set)

    def _stop_clock(self) -> None:
        if self._since is not None:
            assert self._clock is not None
            self._clock.cancel()
            ended = time.monotonic()
            self._left_s -= ended - self._since
            spans.note("episodes/outside the policy", "agent", self._since, ended, turns=self.turns)
            self._since = None

    @property
    def agent_s(self) -> float:
        """Seconds so far in tools, environment and agent."""
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self._budget.seconds - self._left_s + running

    async def within_budget(self, work: Awaitable[float | None]) -> float | None:
        """Return the result of `work`, or None when a budget is used up meanwhile, which cancels it. Raises what the
        engines raised, whatever the agent makes of that."""
        self.start_clock()
        task, late = asyncio.ensure_future(work), asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait((task, late), return_when=asyncio.FIRST_COMPLETED)
            if self._error is not None:
                raise self._error
            if not task.done():
                self._ended(StopReason.WALL_CLOCK)
                return None
            return task.result()
        except EpisodeEndedError:
            return None
        finally:
            for one in (task, late):
                one.cancel()
            await asyncio.gather(task, late, return_exceptions=True)
            self._stop_clock()


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A finished episode, before it is scored."""

    rows: tuple[Row, ...]
    facts: EpisodeFacts
    text: str
    """The content of the last message, for the verifier."""
    reward: float | None
    """The reward of environment or agent; None: the verifier gives it."""


@dataclass(kw_only=True)
class EpisodeRunner:
    """Runs the episodes of a run. Exactly one of `host` and `command` is set, or neither: then tools are called until
    the policy answers without a call."""

    chat: ChatFormat
    budget: Budget
    host: EpisodeHost | None = None
    """The processes of the user's environment or agent."""
    is_agent: bool = False
    """Whether `host` runs agents, not environments."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of each environment."""
    command: tuple[str, ...] = ()
    """The command of an agent that speaks to the gateway."""
    gateway: Gateway | None = None
    tools: Tools | None = None
    event_log: EventLog

    async def run(self, prompt: Prompt, ask: Ask) -> Episode:
        """Run one episode, at most twice, and again where the process of all episodes died. Raises EpisodeFailedError
        when it failed both times."""
        left, deaths = 2, _MOST_DEATHS
        while True:
            try:
                return await self._once(prompt, ask)
            except EpisodeFailedError as error:
                if isinstance(error, HostDiedError) and deaths:
                    deaths -= 1
                else:
                    left -= 1
                self.event_log.event("episode_failed", group=prompt.group, again=left > 0, reason=str(error))
                if not left:
                    raise

    async def _once(self, prompt: Prompt, ask: Ask) -> Episode:
        session = Session(self.chat, ask, self.budget)
        workspace = None if self.tools is None else self.tools.open()
        turn_rewards: list[float] = []
        try:
            if self.command:
                work = self._by_command(session, prompt)
            elif self.host is None:
                work = self._by_tools(session, workspace, prompt)
            elif self.is_agent:
                work = self._by_agent(session, prompt)
            else:
                work = self._in_environment(session, workspace, prompt, turn_rewards)
            reward = await session.within_budget(work)
        except ValueError as error:
            raise EpisodeFailedError(f"its messages cannot be written: {error}") from error
        finally:
            if workspace is not None:
                await workspace.close()
        rows = session.rows.rows()
        if not rows:
            raise EpisodeFailedError(
                f"it ended without a turn ({(session.stopped or StopReason.FINISHED).name.lower()})"
            )
        facts = EpisodeFacts(
            stopped=session.stopped if session.stopped is not None else StopReason.FINISHED,
            turns=session.turns,
            tool_calls=session.tool_calls,
            tool_s=session.agent_s,
            turn_rewards=tuple(turn_rewards) if any(map(math.isfinite, turn_rewards)) else (),
        )
        text = str((session.last or {}).get("content") or "")
        if reward is None and facts.turn_rewards:
            reward = math.fsum(one for one in turn_rewards if math.isfinite(one))
        return Episode(rows=rows, facts=facts, text=text, reward=reward)

    async def _by_tools(self, session: Session, workspace: Workspace | None, prompt: Prompt) -> None:
        """Call the tools that the policy calls, until it answers without a call."""
        messages, schemas = [dict(one) for one in prompt.conversation], () if self.tools is None else self.tools.schemas
        while True:
            turn = await session.turn(messages, schemas)
            if not turn.message.get("tool_calls"):
                return
            session.check_tool_calls()
            messages += [turn.message, *await self._called(session, workspace, turn.message)]

    async def _called(
        self, session: Session, workspace: Workspace | None, message: Message, elsewhere: frozenset[str] = frozenset()
    ) -> list[Message]:
        """Return the results of a message's calls of tools, in order, without those whose names are `elsewhere`."""
        results = list[Message]()
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            if name in elsewhere:
                continue
            if workspace is None:
                text = f"there is no tool {name}"
            else:
                text = (await workspace.call(name, call["function"]["arguments"])).text
            results.append(dict(role="tool", tool_call_id=call["id"], name=name, content=session.observed(text)))
        return results

    async def _in_environment(
        self, session: Session, workspace: Workspace | None, prompt: Prompt, turn_rewards: list[float]
    ) -> None:
        """Alternate between the policy and an environment. Fill in a reward for each turn, NaN for none."""
        assert self.host is not None
        pipe = await self.host.open()
        try:
            opened = await self._step(pipe, dict(reset=_task(prompt), options=self.options), "reset")
            messages, own_tools = _messages(opened["messages"]), tuple(opened["tools"])
            schemas = (*(() if self.tools is None else self.tools.schemas), *own_tools)
            own = frozenset(one["function"]["name"] for one in own_tools)
            while True:
                turn = await session.turn(messages, schemas)
                messages.append(turn.message)
                turn_rewards.append(math.nan)
                session.check_tool_calls()
                calls = [one["function"]["name"] for one in turn.message.get("tool_calls") or ()]
                if self.tools is not None and calls and not own.issuperset(calls):
                    messages += await self._called(session, workspace, turn.message, own)
                    if own.isdisjoint(calls):
                        continue
                answer = await self._step(pipe, dict(step=turn.message), "step")
                if not isinstance(answer, list) or len(answer) != 3:
                    raise EpisodeFailedError("step returned no (messages, reward, done)")
                observed, reward, done = answer
                if (given := _reward(reward, "step")) is not None:
                    turn_rewards[-1] = given
                if done:
                    return
                messages += [{**one, "content": session.observed(str(one["content"]))} for one in _messages(observed)]
        finally:
            pipe.close()

    async def _step(self, pipe: Pipe, request: Mapping[str, Any], what: str) -> Any:
        """Return the environment's answer. Raises EpisodeFailedError when it fails or is stuck."""
        await pipe.send(request)
        try:
            async with asyncio.timeout(self.budget.step_s):
                answer = await pipe.receive()
        except TimeoutError:
            raise EpisodeFailedError(f"{what} took more than {self.budget.step_s:g} s") from None
        if "failed" in answer:
            raise EpisodeFailedError(f"{what} failed: {one_line(answer['failed'], 500)}")
        return answer["ok"]

    async def _by_agent(self, session: Session, prompt: Prompt) -> float | None:
        """Run `run(client, task)`, and answer what it asks, several questions at once if it asks so."""
        assert self.host is not None
        pipe, asked = await self.host.open(), set[asyncio.Task[None]]()

        async def answer(message: Mapping[str, Any]) -> None:
            try:
                turn = await session.turn(_messages(message["messages"]), message.get("tools") or ())
                await pipe.send(dict(number=message["ask"], message=turn.message))
            except (EpisodeEndedError, ValueError) as error:
                await pipe.send(dict(number=message["ask"], error=str(error)))

        try:
            await pipe.send(dict(run=_task(prompt)))
            while "ask" in (message := await self._received(pipe, asked)):
                asked.add(asyncio.create_task(answer(message)))
            if session.stopped is not None:
                return None  # whatever it makes of that
            if "failed" in message:
                raise EpisodeFailedError(f"the agent failed: {one_line(message['failed'], 500)}")
            return _reward(message["ok"], "run")
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            pipe.close()

    async def _received(self, pipe: Pipe, asked: set[asyncio.Task[None]]) -> dict[str, Any]:
        """Return the agent's next message. Raises what a task that answers it raised."""
        receive = asyncio.create_task(pipe.receive())
        try:
            while not receive.done():
                await asyncio.wait({receive, *asked}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in asked if task.done()]:
                    asked.discard(task)
                    task.result()
            return receive.result()
        finally:
            receive.cancel()
            await asyncio.gather(receive, return_exceptions=True)

    async def _by_command(self, session: Session, prompt: Prompt) -> float | None:
        """Run the user's command, which asks the gateway; kill it, and all in its session, at the end of the episode.
        The last line that it prints may be {"reward": number}."""
        assert self.gateway is not None
        key, url = self.gateway.open(session), self.gateway.url
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENKEEL_")} | dict(
            OPENAI_BASE_URL=f"{url}/v1",
            OPENAI_API_KEY=key,
            ANTHROPIC_BASE_URL=url,
            ANTHROPIC_API_KEY=key,
            EVENKEEL_TASK=json.dumps(_task(prompt, answer=False)),
        )
        command = with_own_python(self.command)
        try:
            process = await asyncio.create_subprocess_exec(
                *dying_with_this(signal.SIGKILL),
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self.gateway.close(key)
            raise EpisodeFailedError(f"{command[0]} cannot be started: {error.strerror}") from error
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            output, said = await asyncio.gather(_last_bytes(process.stdout), _last_bytes(process.stderr))
            status = await process.wait()
        finally:
            self.gateway.close(key)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if session.stopped is not None:
            return None
        if status:
            last = said.decode(errors="replace").strip().rpartition("\n")[2]
            raise EpisodeFailedError(f"{command[0]} ended with status {status}: {one_line(last, 300)}")
        with suppress(ValueError):
            found = json.loads(output.decode(errors="replace").strip().rpartition("\n")[2])
            if isinstance(found, dict) and isinstance(found.get("reward"), int | float):
                return _reward(+found["reward"], command[0])
        return None


async def _last_bytes(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end, and return its last bytes."""
    kept = b""
    while data := await stream.read(1 << 16):
        kept = (kept + data)[-_MOST_OUTPUT_BYTES:]
    return kept


def _task(prompt: Prompt, *, answer: bool = True) -> dict[str, Any]:
    """Return what environment and agent get to know of a prompt. A command does not get the answer: it may show the
    policy all that it knows."""
    task = dict(prompt=prompt.text, messages=[*prompt.conversation], metadata=dict(prompt.metadata), group=prompt.group)
    return {**task, "answer": prompt.answer} if answer else task


def _reward(given: Any, giver: str) -> float | None:
    """Return a reward that came from foreign code; None: it gave none. Raises EpisodeFailedError for what is none."""
    if given is not None and not is_number(given):
        raise EpisodeFailedError(f"{giver} gave the reward {given!r:.100}, expected a finite number or None")
    return None if given is None else float(given)


def _messages(given: Any) -> list[Message]:
    """Return messages that came from foreign code. Raises EpisodeFailedError for what is none."""
    if isinstance(given, str):
        given = [dict(role="user", content=given)]
    if not isinstance(given, list | tuple) or not all(
        isinstance(one, dict) and isinstance(one.get("role"), str) for one in given
    ):
        raise EpisodeFailedError(f'expected messages like {{"role": "user", "content": …}}, got {str(given)[:200]}')
    return [{"content": "", **one} for one in given]
