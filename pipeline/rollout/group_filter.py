"""A filter of the user's own: which sampled groups are trained on (`prompts.group_filter`).

    def mixed(rewards, info):           # it gets what it names of GIVEN
        known = [reward for reward in rewards if reward is not None]
        return all(one["finish"] == "stop" for one in info) and len(set(known)) > 1

It is asked about one finished group at a time, in a thread of the collector. Held-out prompts are not filtered.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pipeline.beside_loop import beside_loop
from pipeline.data.batch import Completion, Group
from pipeline.errors import RecipeError, RewardError
from pipeline.own_function import own_function, truth_of
from precision.text import one_line, quoted

GIVEN = ("prompt", "answer", "metadata", "responses", "rewards", "reward_parts", "info")
"""What a filter may name: text and columns of the prompt, then lists with an entry a sample. A reward is None where the
verifier failed; `info` has prompt_tokens, response_tokens and finish."""


@dataclass
class GroupFilter:
    """The function that a recipe names."""

    name: str
    function: Callable[..., Any]
    names: frozenset[str]
    deadline_s: float
    """For one group; past it the run ends."""
    _one_at_a_time: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    @staticmethod
    def load(name: str, deadline_s: float) -> GroupFilter:
        """Raises RecipeError for what cannot be imported, and for a function that asks for something else."""
        function, names = own_function("prompts.group_filter", name, GIVEN)
        if inspect.iscoroutinefunction(function):
            raise RecipeError(f"prompts.group_filter {name} is async; write it as a plain function")
        return GroupFilter(name, function, names, deadline_s)

    async def keeps(self, group: Group, text: Callable[[Completion], str]) -> bool:
        """Whether the group may be trained on; `text` decodes a response. Raises RewardError when the function fails,
        is too late, or says neither true nor false."""
        samples, prompt = group.samples, group.prompt
        given: dict[str, Any] = dict(
            prompt=prompt.text,
            answer=prompt.answer,
            metadata=prompt.metadata,
            rewards=[sample.reward if sample.judged else None for sample in samples],
            reward_parts=[dict(sample.reward_parts) for sample in samples],
            info=[_info(len(prompt.tokens), sample.completion) for sample in samples],
        )
        if "responses" in self.names:
            given["responses"] = [await beside_loop(text, sample.completion) for sample in samples]
        chosen = {key: value for key, value in given.items() if key in self.names}
        try:
            async with self._one_at_a_time:
                async with asyncio.timeout(self.deadline_s) as limit:
                    said = await _in_a_thread(lambda: self.function(**chosen))
        except Exception as error:
            if not limit.expired():  # a TimeoutError may be the function's own
                raise RewardError(
                    f"prompts.group_filter {self.name} failed on group {prompt.group} ({type(error).__name__}: "
                    f"{one_line(error, 200)}); correct it"
                ) from error
            raise RewardError(
                f"prompts.group_filter {self.name} took more than {self.deadline_s:g} s for group {prompt.group}; "
                "make it faster, or raise reward.deadline_s"
            ) from error
        if (truth := truth_of(said)) is None:
            raise RewardError(
                f"prompts.group_filter {self.name} returned {quoted(said)} for group {prompt.group}, expected True or "
                "False; correct it"
            )
        return truth


def _info(prompt_tokens: int, completion: Completion) -> dict[str, Any]:
    return dict(prompt_tokens=prompt_tokens, response_tokens=len(completion.tokens), finish=completion.finish)


async def _in_a_thread(call: Callable[[], Any]) -> Any:
    """Its result. The thread is a daemon: one that hangs does not hold up the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        failed: Exception | None = None
        try:
            result = call()
        except StopIteration as error:  # a future does not take it
            failed = RuntimeError(f"StopIteration: {error}")
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            failed = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=work, name="group-filter", daemon=True).start()
    return await future
