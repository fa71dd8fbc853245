"""Define the recipe's `task`, `prompts` and `reward` sections: the source of prompts and rewards, the choice of
prompts, and how rewards are run. Tasks themselves are in pipeline.tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pipeline.advantages.methods import OverlongPenalty
from pipeline.config.sections import Changes, Probability, Section
from precision.text import quoted


class DigitsTask(Section):
    """Settings that the generated digit tasks share."""

    min_digits: PositiveInt = 4
    max_digits: PositiveInt = Field(16, le=4096)
    num_prompts: PositiveInt = Field(100_000, le=10**7, description="Prompts of an epoch.")
    demonstration_noise: Probability = Field(0.1, description="sft only: chance that a target digit is off by one.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits {self.min_digits} is above max_digits {self.max_digits}; lower it")
        return self


class SortDigitsTask(DigitsTask):
    name: Literal["sort_digits"] = "sort_digits"


class SpellDigitsTask(DigitsTask):
    name: Literal["spell_digits"]
    misspelt_share: Probability = Field(0.6, description="sft only: how often 3, 6 and 8 get a wrong letter.")


class Columns(Section):
    """Names of the data's columns that hold the parts of a problem. `a.b` is b of the object a."""

    prompt: str | None = Field(
        None,
        min_length=1,
        description="Text, or messages for the chat template; default prompt, or messages where there is no prompt.",
    )
    answer: str | None = Field(
        "answer",
        min_length=1,
        description="Text or a number; null: the data has no answers, and the reward needs none.",
    )
    system_prompt: str | None = Field(
        None,
        min_length=1,
        description="Text: the row's system prompt; the task's system_prompt where it is null or empty.",
    )


FUNCTION = r"[\w.]+:\w+"
"""Pattern of the name of a user's own function or class."""
_SOURCE_NAME = "[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"


def _name_the_module(reward: str | None) -> str | None:
    file, ending, function = (reward or "").partition(".py:")
    if ending:
        raise ValueError(f"is {quoted(reward)}, expected a module, not its file; write {quoted(f'{file}:{function}')}")
    return reward


class DataSource(Section):
    """One of several sources. A key that it leaves out is as in the task."""

    path: Path
    name: str = Field(
        "",
        pattern=f"(|{_SOURCE_NAME})",
        description="Name in metrics and reports; default: the file's name without its ending.",
    )
    weight: PositiveFloat = Field(1.0, description="Share of its prompts, in proportion to the other sources' weights.")
    held_out_path: Path | None = None
    columns: Columns | None = None
    filter: str | None = Field(None, pattern=FUNCTION)
    reward: Annotated[str | None, AfterValidator(_name_the_module)] = None
    system_prompt: str | None = Field(None, min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("name") and isinstance(data.get("path"), str | Path):
            stem = re.sub("[^A-Za-z0-9_.-]", "_", Path(data["path"]).stem)
            return {**data, "name": stem.lstrip("_.-")[:64] or "source"}
        return data


_TEMPLATES_OWN = ("messages", "add_generation_prompt", "tools", "documents")
"""Arguments that every chat template gets anyway, beside the text of the special tokens."""


class DataTask(Section):
    name: Literal["data"]
    path: Path | None = Field(
        None, description="JSON Lines, Parquet, or a folder that Hugging Face datasets saved (docs/data.md)."
    )
    sources: tuple[DataSource, ...] = Field(
        (), description="In place of path: several sources, each with path, weight, name, reward, columns …"
    )
    held_out_path: Path | None = Field(None, description="Evaluation prompts; otherwise 1 in 16 rows is held out.")
    columns: Columns = Field(default_factory=Columns)
    filter: str | None = Field(
        None,
        pattern=FUNCTION,
        description="package.module:function(prompt, answer, metadata): true for the rows that are problems.",
    )
    reward: Annotated[str, AfterValidator(_name_the_module)] = Field(
        "math_verify",
        description="math_verify, exact_match, python_tests (answers are tests, see docs/sandbox.md), or "
        "package.module:function(prompt, response, answer, metadata).",
    )
    chat_template: bool = Field(
        False, description="Put the prompt, as the user's turn, or its messages through the tokenizer's chat template."
    )
    system_prompt: str | None = Field(
        None, min_length=1, description="First message of each conversation that begins without a system prompt."
    )
    template_arguments: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Arguments of the chat template, by name: enable_thinking: false makes Qwen3 answer at once.",
    )
    template_date: date | None = Field(
        None, description="The day that a chat template writes into prompts (strftime_now), the same in every start."
    )
    sha256: str | None = Field(
        None, pattern="[0-9a-f]{64}", description="Of the data; frozen when the run begins, and compared at each start."
    )
    template_sha256: str | None = Field(
        None, pattern="[0-9a-f]{64}", description="Of the chat template, likewise; None without chat_template."
    )

    @model_validator(mode="before")
    @classmethod
    def _columns_of_the_task(cls, data: Any) -> Any:
        """Return the data with the task's columns in each source, for those that the source leaves out."""
        if not isinstance(data, dict) or not isinstance(data.get("columns"), dict):
            return data
        if not isinstance(data.get("sources"), list | tuple):
            return data
        sources = []
        for source in data["sources"]:
            own = source.get("columns") if isinstance(source, dict) else None
            sources.append({**source, "columns": {**data["columns"], **own}} if isinstance(own, dict) else source)
        return {**data, "sources": sources}

    @model_validator(mode="after")
    def _a_template_writes_it(self) -> Self:
        columns = [self.columns, *(source.columns or Columns() for source in self.sources)]
        given = [self.system_prompt, *(source.system_prompt for source in self.sources)]
        if any([*given, *(one.system_prompt for one in columns)]) and not self.chat_template:
            raise ValueError("system_prompt is written by the chat template; set task.chat_template to true")
        if self.template_date is not None and not self.chat_template:
            raise ValueError("template_date is for the chat template; set task.chat_template to true")
        if self.template_arguments and not self.chat_template:
            raise ValueError("template_arguments are for the chat template; set task.chat_template to true")
        if own := [name for name in self.template_arguments if name in _TEMPLATES_OWN or name.endswith("_token")]:
            raise ValueError(f"template_arguments.{own[0]} is given to each chat template anyway; leave it out")
        return self

    @model_validator(mode="after")
    def _one_path_or_several_sources(self) -> Self:
        if (self.path is None) == (not self.sources):
            found = "neither path nor sources is" if self.path is None else "both path and sources are"
            raise ValueError(f"{found} given, expected one of them; set task.path, or task.sources to a list of them")
        if self.sources and self.held_out_path is not None:
            raise ValueError("held_out_path is of one file; give each of task.sources its own")
        names = [source.name for source in self.sources]
        if again := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two sources are called {again[0]!r}; give each of task.sources a name of its own")
        return self

    def of(self, source: DataSource) -> DataTask:
        """Return the task of one source alone."""
        own = {
            key: value for key in ("columns", "filter", "reward", "system_prompt") if (value := getattr(source, key))
        }
        paths = dict(path=source.path, held_out_path=source.held_out_path)
        return self.model_copy(update=dict(**paths, sources=(), sha256=None, template_sha256=None, **own))


class OwnTask(Section):
    """A task of the user's own; `name` may be left out."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: Literal["own"] = "own"
    class_: str = Field(
        alias="class",
        pattern=FUNCTION,
        description="package.module:Class, importable where the run's processes run; made as Class(seed=…, **options).",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Plain data for the class.")


TaskSection = Annotated[SortDigitsTask | SpellDigitsTask | DataTask | OwnTask, Field(discriminator="name")]


class PromptsSection(Section):
    on_resume: ClassVar[Changes] = {"*": "free"}

    refill: bool = Field(
        False, description="Dynamic sampling (DAPO): groups of equal rewards are dropped and further prompts asked."
    )
    group_filter: str | None = Field(
        None,
        pattern=FUNCTION,
        description="package.module:function of rewards, responses …: true for the sampled groups that are trained on "
        "(docs/rewards.md); in place of each other one a further prompt is asked.",
    )
    max_refills: PositiveInt = Field(
        3, description="refill, group_filter: at most so many times prompts_per_batch further prompts."
    )
    solved_pass_rate: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="Prompts solved at least this often so far are never asked again (ScaleRL .9).",
    )
    solved_min_samples: PositiveInt | None = Field(
        None, description="Samples of a prompt before its pass rate counts; default one group."
    )


class RewardSection(Section):
    on_resume: ClassVar[Changes] = dict.fromkeys(
        ("workers", "concurrency", "retries", "deadline_s", "memory_mib", "max_failed_share"), "free"
    )

    workers: PositiveInt = Field(1, le=4096, description="Verifier processes of each reward function.")
    concurrency: PositiveInt = Field(
        16, description="Samples that each worker has under way at once, where the reward is an async function."
    )
    retries: NonNegativeInt = Field(
        3,
        le=30,
        description="Retries after a passing HTTP error, with growing pauses, within the deadline.",
    )
    deadline_s: PositiveFloat = Field(10.0, description="A verifier that takes longer is killed; its sample fails.")
    sandbox: Literal["auto", "none"] = Field(
        "auto",
        description="auto: reward code runs in the best sandbox of the machine (docs/sandbox.md), never without. "
        "none: with all rights of this user and the network; only for code that you trust.",
    )
    memory_mib: PositiveInt = Field(2048, description="Most memory of a verifier and of all that it starts.")
    max_failed_share: Probability = Field(
        0.1,
        description="Share of samples whose verifier may fail. The run ends when more of the last 256 samples have no "
        "reward than this share explains (chance one in a million).",
    )
    math_tolerance: float = Field(
        5e-6,
        ge=0.0,
        lt=1.0,
        description="math_verify: a decimal may differ by this share of the answer; integers and fractions are exact.",
    )
    special_tokens: bool = Field(
        False,
        description="Give rewards the response with its special tokens, except the token that ended it: needed by a "
        "reward of the format where <think> is a special token.",
    )
    program_tolerance: float = Field(
        1e-6,
        ge=0.0,
        le=1.0,
        description="python_tests: numbers with a fraction may differ by this, or by this share of the number.",
    )
    solved_at: float = Field(
        1.0,
        ge=-3e38,
        le=3e38,
        description="A sample with at least this reward solved its problem: for pass rates, prompts.solved_pass_rate, "
        "and the advantages that weigh by them. Compared as float32.",
    )
    overlong: OverlongPenalty | None = Field(
        None, description="Penalty of responses near rollout.max_new_tokens (DAPO); default: none."
    )


class McpServer(Section):
    """A server of the Model Context Protocol over standard input and output."""

    command: tuple[str, ...] = Field(
        min_length=1,
        description="What starts it, in the working folder of the run. It sees what a reward function does, writes to "
        "TMPDIR, which is HOME, and has no network.",
    )
    env: tuple[str, ...] = Field(
        (), description="Names of environment variables that it gets beside PATH and the like."
    )


class EpisodeSection(Section):
    """Attempts of several turns: an environment, an agent, or tools around the policy (docs/agents.md)."""

    environment: str | None = Field(
        None,
        pattern=FUNCTION,
        description="package.module:Class with `async reset(task)` → messages and `async step(message)` → (messages, "
        "reward or None, done). An instance serves one episode, in the sandbox of rewards.",
    )
    options: Mapping[str, Any] = Field({}, description="Arguments with which each environment is made.")
    agent: str | None = Field(
        None,
        pattern=FUNCTION,
        description="package.module:function, `async def run(client, task)` → reward or None. It asks the policy by "
        "`await client.chat(messages, tools)`, in the sandbox of rewards.",
    )
    command: tuple[str, ...] = Field(
        (),
        description="The command of an agent that asks the policy as OpenAI's or Anthropic's API, whose address and "
        "key are in its environment. It runs with this user's rights; its task is JSON in EVENKEEL_TASK.",
    )
    tools: tuple[Literal["python", "shell", "calculator"], ...] = Field(
        (), description="Tools that the policy may call, run in the sandbox of rewards, without network."
    )
    mcp: Mapping[str, McpServer] = Field(
        {},
        description="MCP servers over stdio, whose tools the policy may call: each a process of its own in each "
        "episode that calls it, in the sandbox of rewards.",
    )
    turns: PositiveInt = Field(16, description="Most turns of the policy in an episode.")
    sampled_tokens: PositiveInt | None = Field(
        None, description="Most tokens that the policy writes in an episode; default: as many as fit in its context."
    )
    tool_calls: PositiveInt = Field(64, description="Most calls of tools in an episode.")
    agent_s: PositiveFloat = Field(
        600.0, description="Longest time of an episode in tools, environment and agent; waits for engines do not count."
    )
    step_s: PositiveFloat = Field(
        60.0, description="Longest time of one step of an environment or one call of a tool; then it counts as stuck."
    )
    observation_bytes: PositiveInt = Field(
        16384, description="Most bytes that the policy reads of one answer of a tool or environment."
    )
    memory_mib: PositiveInt = Field(2048, description="Most memory of each process of environment, agent or tool.")

    @model_validator(mode="after")
    def _one_way_in(self) -> Self:
        ways = [name for name in ("environment", "agent", "command") if getattr(self, name)]
        if len(ways) > 1:
            raise ValueError(f"{' and '.join(ways)} are given, expected one of them at most; leave the others out")
        if not ways and not self.tools and not self.mcp:
            raise ValueError(
                "none of environment, agent, command, tools and mcp is given; name what episodes consist of"
            )
        if ways and ways[0] != "environment" and (self.tools or self.mcp):
            raise ValueError(f"tools and mcp are not for episode.{ways[0]}, which has its own; leave them out")
        if self.options and not self.environment:
            raise ValueError("options are for an environment, and none is named; leave them out")
        return self
