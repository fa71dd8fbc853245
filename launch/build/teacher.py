"""Check, start and reach the teacher of a run that distills."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from launch.build.api_key import TEACHER_KEY_VARIABLE, read_api_key
from launch.build.components import TaskPrompts
from launch.build.engines import engine_dtype
from megatron_bridge.hf.model_config import read_config, size_of
from pipeline.config.recipe import Recipe
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EngineUnavailableError, ModelError, RecipeError
from pipeline.rewards.pool import FailureWatch
from pipeline.rollout.group_sampler import TeacherScores
from pipeline.tasks.tokenizer import Tokenizer
from rollout_sglang.client import TeacherServers
from rollout_sglang.server.start import EngineSpec, ServerProcess, free_port, start

_TRIED_PROMPTS = 4


def check_teacher(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Raise RecipeError for a teacher's folder with another tokenizer, ModelError for one that is no model."""
    if recipe.distillation is None or (folder := recipe.distillation.path) is None:
        return
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"distillation.path {folder} has no config.json; give the folder of a Hugging Face model, or the servers "
            "of one as distillation.urls"
        )
    rows = size_of(read_config(folder), "vocab_size")
    theirs, ours = Tokenizer.load(folder, vocab_size=rows).vocabulary, tokenizer.vocabulary
    if theirs == ours:
        return
    token = min(theirs.items() ^ ours.items())[0]
    raise RecipeError(
        f"distillation.path {folder} has another tokenizer than model.path {recipe.model.path}: token {token!r} is "
        f"{theirs.get(token, 'missing')} there and {ours.get(token, 'missing')} here; distill from a model of the same "
        "tokenizer"
    )


@asynccontextmanager
async def teacher_of(
    run: RunDirectory, recipe: Recipe, prompts: TaskPrompts, event_log: EventLog
) -> AsyncIterator[TeacherScores | None]:
    """Yield the run's teacher; None without distillation. A server started here dies with the calling thread. Raises
    EngineStartError, RecipeError for servers of another tokenizer, EngineUnavailableError."""
    section = recipe.distillation
    if section is None:
        yield None
        return
    async with AsyncExitStack() as stack:
        process: ServerProcess | None = None
        urls = section.urls
        if section.path is None:
            key = read_api_key(variable=TEACHER_KEY_VARIABLE)
        else:
            dtype = engine_dtype(recipe)
            spec = EngineSpec(
                model=section.path,
                port=free_port(),
                precision="fp32" if dtype == "float32" else "bf16",
                dtype=dtype,
                log=run.logs / "teacher.log",
                version=0,
                api_key=secrets.token_hex(16),
                tensor_parallel=section.tensor_parallel,
                context_tokens=recipe.rollout.context_tokens,
                extra_args=section.extra_args,
            )
            process, urls, key = start(spec), (spec.url,), spec.api_key
            stack.callback(process.stop)
            await asyncio.to_thread(process.wait_ready, recipe.rollout.start_deadline_s)
        servers = TeacherServers(urls, key, request_deadline_s=recipe.rollout.request_deadline_s)
        stack.push_async_callback(servers.close)
        tried = [prompts.prompt(group) for group in range(min(_TRIED_PROMPTS, prompts.num_problems))]
        texts = {prompts.tokenizer.decode(prompt.tokens, special=True): prompt.tokens for prompt in tried}
        await servers.require_same_tokenizer(texts)

        def require_alive() -> None:
            if process is not None and process.poll() is not None:
                raise EngineUnavailableError(f"the teacher's server {process.how_it_ended()}; {process.why()}")

        yield TeacherScores(
            teacher=servers,
            retries=recipe.reward.retries,
            watch=FailureWatch(
                "the teacher",
                recipe.reward.max_failed_share,
                tell=lambda reason, detail: event_log.event("teacher_failed", reason=reason, detail=detail),
                remedy="look at the teacher's servers",
            ),
            require_alive=require_alive,
        )
