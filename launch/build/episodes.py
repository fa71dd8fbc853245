"""Build the runner of episodes, with the processes, tools and gateway that the recipe's section `episode` names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from launch.build.rewards import choose_sandbox
from pipeline.config.recipe import Recipe
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.episodes.chat_format import ChatFormat
from pipeline.episodes.episode import Budget, EpisodeRunner
from pipeline.episodes.host import EpisodeHost
from pipeline.episodes.tools import MCP_SERVERS, Tools
from pipeline.rewards.worker_process import TOOLBOX
from pipeline.tasks.tokenizer import Tokenizer


@asynccontextmanager
async def build_episodes(
    run: RunDirectory, recipe: Recipe, tokenizer: Tokenizer, event_log: EventLog
) -> AsyncIterator[EpisodeRunner | None]:
    """Yield the runner; None for a recipe without episodes. Raises RecipeError if the user's code cannot be imported
    or an MCP server does not answer, if this machine has no sandbox for it, or if the chat format cannot be used."""
    section = recipe.episode
    if section is None:
        yield None
        return
    chat = ChatFormat.of(tokenizer)
    if not chat.is_append_only:
        event_log.event("chat_format", why=chat.why_not)
    code = section.environment or section.agent
    foreign = [code] if code else []
    foreign += [TOOLBOX] if {*section.tools} - {"calculator"} else []
    foreign += [MCP_SERVERS] if section.mcp else []
    sandbox = choose_sandbox(run, foreign, event_log) if foreign and recipe.reward.sandbox == "auto" else None
    async with AsyncExitStack() as stack:
        gateway = None
        if section.command:
            from rollout_sglang.gateway.server import Gateway  # uvicorn and starlette, which come with SGLang

            gateway = await stack.enter_async_context(Gateway())
        host = stack.enter_context(EpisodeHost(code, section.memory_mib, sandbox)) if code else None
        tools = None
        if section.tools or section.mcp:
            tools = await stack.enter_async_context(
                Tools(
                    section.tools,
                    mcp=section.mcp,
                    sandbox=sandbox,
                    deadline_s=section.step_s,
                    memory_mib=section.memory_mib,
                )
            )
            await tools.list_servers()
        yield EpisodeRunner(
            chat=chat,
            budget=Budget(
                turns=section.turns,
                new_tokens=recipe.rollout.max_new_tokens,
                sampled_tokens=recipe.most_sampled_tokens,
                context_tokens=recipe.rollout.context_tokens,
                tool_calls=section.tool_calls,
                seconds=section.agent_s,
                step_s=section.step_s,
                observation_bytes=section.observation_bytes,
            ),
            host=host,
            is_agent=section.agent is not None,
            options=section.options,
            command=section.command,
            gateway=gateway,
            tools=tools,
            event_log=event_log,
        )
