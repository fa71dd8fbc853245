"""Build from a recipe what the roles share: tokenizer, prompts, sampling, formats, objective."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from megatron_bridge.hf.model_config import ModelConfig, read_config, read_hf_config, size_of
from pipeline.config.recipe import Recipe
from pipeline.config.task_sections import DataTask
from pipeline.data.batch import LogprobContract, Prompt, Sampling
from pipeline.data.batch_values import Limits
from pipeline.data.routed_experts import ExpertShape
from pipeline.demonstrations import named_ends
from pipeline.errors import ModelError, RecipeError
from pipeline.rollout.batch_builder import SolvedPromptRule
from pipeline.rollout.group_sampler import Interruption
from pipeline.tasks import Problem, Task, build_task
from pipeline.tasks.data import check_template
from pipeline.tasks.mixture import MixedOrder, Mixture, PromptOrder, fitting, order_of
from pipeline.tasks.tokenizer import Tokenizer, check_written
from pipeline.trainer.loop import Scoring
from precision.corrections import Corrected, NoCorrection
from precision.formats.quant_map import QuantMapFile
from precision.objectives.objective import Objective
from precision.reference import NearReference
from precision.text import quoted

if TYPE_CHECKING:
    from precision.formats.quant_map import QuantMap

MOST_SPARE_ROWS = 15
"""Most embedding rows without a token, or 1 in 64: embeddings are padded, as Qwen3's 151,669 tokens to 151,936 rows."""


@dataclass
class TaskPrompts:
    """The prompts of a run as tokens; group i is problem `problem(i)` of the task."""

    task: Task
    tokenizer: Tokenizer
    order: PromptOrder | MixedOrder
    num_problems: int = field(init=False)
    sources: Mapping[str, range] = field(init=False)

    def __post_init__(self) -> None:
        self.num_problems = self.task.num_prompts
        self.sources = self.task.problems if isinstance(self.task, Mixture) else {}

    def problem(self, group: int) -> int:
        return self.order.problem(group)

    def prompt(self, group: int) -> Prompt:
        problem = self.problem(group)
        return replace(self._tokenized(group, self.task.problem(problem)), problem=problem)

    def held_out(self, count: int) -> Sequence[Prompt]:
        """Return up to `count` held-out prompts. Their groups are negative, since they are in no batch."""
        of_one = range(min(count, self.task.num_held_out))
        chosen = self.task.measured(count) if isinstance(self.task, Mixture) else of_one
        return [self._tokenized(-1 - index, self.task.held_out(index)) for index in chosen]

    def _tokenized(self, group: int, problem: Problem) -> Prompt:
        tokens = self.tokenizer.encode(text_of(problem, self.task, self.tokenizer))
        return Prompt(
            group=group,
            text=problem.text,
            answer=problem.answer,
            tokens=tuple(tokens),
            metadata=problem.metadata,
            source=problem.source,
            reward=problem.reward or self.task.reward,
            messages=problem.messages,
        )


def text_of(problem: Problem, task: Task, tokenizer: Tokenizer) -> str:
    """Return the text that the model reads of a problem. Raises RecipeError if the chat template drops a message."""
    if not task.chat_template:
        return problem.text
    messages = problem.messages or [dict(role="user", content=problem.text)]
    written = tokenizer.conversation(messages)
    check_written(messages, written, tokenizer, f"the prompt {quoted(problem.text)}")
    return written


def build_tokenizer(recipe: Recipe) -> Tokenizer:
    """Return the model's tokenizer, with the task's arguments for its chat template. Raises ModelError if it does not
    fit the model, unless model.check_tokenizer is false."""
    folder, data = recipe.model.path, recipe.task if isinstance(recipe.task, DataTask) else None
    rows = size_of(read_hf_config(folder), "vocab_size")
    tokenizer = Tokenizer.load(
        folder,
        vocab_size=rows,
        template_arguments=None if data is None else data.template_arguments,
        template_date=None if data is None else data.template_date,
    )
    if not recipe.model.check_tokenizer:
        return tokenizer
    if (spare := rows - tokenizer.vocab_size) > max(MOST_SPARE_ROWS, rows // 64):
        raise ModelError(
            f"the tokenizer of {folder} has {tokenizer.vocab_size} tokens, and the model {rows} rows (config.json: "
            f"vocab_size): {spare} of them would have no text; put the model's own tokenizer there, or set "
            "model.check_tokenizer=false where this one is meant"
        )
    if (ends := named_ends(folder)) and tokenizer.eos_token_id not in ends:
        raise ModelError(
            f"the tokenizer of {folder} ends text by {quoted(tokenizer.eos_token)}, token {tokenizer.eos_token_id}, "
            f"but config.json and generation_config.json name {', '.join(map(str, sorted(ends)))} (eos_token_id); "
            "correct one of them, or set model.check_tokenizer=false where this is meant"
        )
    return tokenizer


def build_prompts(recipe: Recipe, tokenizer: Tokenizer) -> TaskPrompts:
    """Return the run's prompts, except those that are too long. Raises ModelError or RecipeError if the tokenizer
    cannot encode the task or the interruption, or if the interruption does not fit."""
    task = build_task(recipe.task, recipe.run.seed)
    check_template(recipe.task, tokenizer)

    def count(problems: Sequence[Problem]) -> list[int]:
        counts = tokenizer.count([text_of(problem, task, tokenizer) for problem in problems])
        if 0 in counts:
            empty = problems[counts.index(0)]
            raise RecipeError(
                f"{empty.where or 'a prompt'}: the tokenizer makes no token of {quoted(empty.text)}, and an engine "
                "answers nothing to that; remove the row, or leave it out by task.filter"
            )
        return counts

    task = fitting(task, count, recipe.rollout.context_tokens - recipe.rollout.max_new_tokens)
    prompts = TaskPrompts(task, tokenizer, order_of(task, recipe.run.seed))
    prompts.prompt(0)
    prompts.held_out(1)
    build_interruption(recipe, tokenizer)
    return prompts


def build_interruption(recipe: Recipe, tokenizer: Tokenizer) -> Interruption | None:
    """Return how responses are cut short; None if they are not. Raises RecipeError."""
    section, longest = recipe.rollout.interruption, recipe.rollout.max_new_tokens
    if section is None:
        return None
    try:
        phrase = tuple(tokenizer.encode(section.phrase))
    except ModelError as error:
        raise RecipeError(f"rollout.interruption.phrase: {error}") from error
    needed = section.to_tokens + len(phrase) + section.answer_tokens
    if needed > longest:
        raise RecipeError(
            f"rollout.interruption: to_tokens {section.to_tokens} + {len(phrase)} tokens of the phrase + answer_tokens "
            f"{section.answer_tokens} = {needed}, at most rollout.max_new_tokens {longest} fit; raise the latter"
        )
    return Interruption(
        from_tokens=section.from_tokens,
        to_tokens=section.to_tokens,
        phrase=phrase,
        answer_tokens=section.answer_tokens,
        seed=recipe.run.seed,
    )


def build_solved_prompt_rule(recipe: Recipe) -> SolvedPromptRule | None:
    """Return when a problem counts as solved and is not asked again; None for never."""
    prompts = recipe.prompts
    if prompts.solved_pass_rate is None:
        return None
    return SolvedPromptRule(
        pass_rate=prompts.solved_pass_rate,
        min_samples=prompts.solved_min_samples or recipe.rollout.group_size,
        solved_at=recipe.reward.solved_at,
    )


def build_contract(recipe: Recipe, tokenizer: Tokenizer) -> LogprobContract:
    rollout = recipe.rollout
    return LogprobContract(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        tokenizer_sha256=tokenizer.sha256,
        kept_set=rollout.asks_for_kept_sets,
    )


def build_limits(recipe: Recipe) -> Limits:
    """Return the limits of a batch's values; sizes of a model whose folder is gone are left out."""
    longest = recipe.rollout.max_new_tokens if recipe.episode is None else recipe.rollout.context_tokens
    try:
        model = ModelConfig.from_hf(read_config(recipe.model.path))
    except ModelError:
        return Limits(max_response_tokens=longest)
    experts = None if model.experts is None else model.experts.count
    return Limits(vocab_size=model.vocab_size, max_response_tokens=longest, num_experts=experts)


def build_sampling(recipe: Recipe, temperature: float | None = None) -> Sampling:
    """Return the sampling of rollouts; with `temperature`, that of evaluations, over the whole vocabulary."""
    rollout, vocab_size = recipe.rollout, build_limits(recipe).vocab_size
    if temperature is not None:
        return Sampling(max_new_tokens=rollout.max_new_tokens, temperature=temperature, vocab_size=vocab_size)
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        vocab_size=vocab_size,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        kept_set=rollout.asks_for_kept_sets,
        experts=build_expert_shape(recipe),
    )


def build_expert_shape(recipe: Recipe) -> ExpertShape | None:
    """Return the shape of engines' expert routes; None without replay. Raises RecipeError for a dense model."""
    if not recipe.rollout.replay_experts:
        return None
    shape = ModelConfig.from_hf(read_hf_config(recipe.model.path))
    if shape.experts is None:
        raise RecipeError(
            f"rollout.replay_experts is true, but {recipe.model.path} ({shape.architecture}) has no experts; set it to "
            "false, or train a mixture such as Qwen3-MoE"
        )
    return ExpertShape(
        num_layers=shape.num_layers,
        moe_layers=tuple(range(shape.num_layers)),  # ModelConfig refuses mixtures with dense layers
        num_experts=shape.experts.count,
        per_token=shape.experts.per_token,
    )


def build_quant_map(recipe: Recipe) -> QuantMap | None:
    """Return the formats of weights when a run begins; None for unquantized rollouts. Raises RecipeError."""
    rollout = recipe.rollout
    if rollout.quantized_format is None:
        return None
    return quant_map_of(recipe, rollout.quant_map or QuantMapFile(base=rollout.quantized_format.value))


def quant_map_of(recipe: Recipe, file: QuantMapFile) -> QuantMap:
    """Return the map of a file for the run's model. Raises RecipeError if it does not fit the model."""
    from precision.formats.quant_map import QuantMap

    shape = ModelConfig.from_hf(read_hf_config(recipe.model.path))
    try:
        return QuantMap.from_file(file, shape.num_layers, None if shape.experts is None else shape.experts.count)
    except ValueError as error:
        raise RecipeError(f"rollout.quant_map: {error}") from error


def require_engines_here(urls: Sequence[str]) -> None:
    """Raise RecipeError unless all engines are on this machine, where they can open the learner's memory."""
    away = [url for url in urls if not _is_here(urlsplit(url).hostname or "")]
    if away:
        raise RecipeError(
            f"weights.channel is ipc, but {', '.join(away)} {'is' if len(away) == 1 else 'are'} not on this machine, "
            "whose memory the engines must open; use weights.channel: broadcast or disk"
        )


def _is_here(host: str) -> bool:
    """Return whether a socket can be bound to an address of the host."""
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((address[0], 0))
                return True
    return False


def build_objective(recipe: Recipe) -> Objective:
    """Return the recipe's objective, with its correction and its reference."""
    objective = recipe.objective
    if not isinstance(recipe.correction, NoCorrection):
        objective = Corrected(inner=objective, correction=recipe.correction)
    return objective if recipe.reference is None else NearReference(inner=objective, reference=recipe.reference)


def build_scoring(recipe: Recipe) -> Scoring:
    """Return which scores of a batch the recipe's objective and learning-rate rule read."""
    facts, by_ess = build_objective(recipe).facts, recipe.learner.optimizer.lr_by_lag == "ess"
    return Scoring(
        prepares=facts.needs_scoring,
        reads_step=facts.reads_step_logprobs,
        reads_old=facts.needs_old_logprobs or by_ess,
        sizes_steps=by_ess,
    )


def scoring_passes(recipe: Recipe) -> int:
    """Return how often a batch is scored, by the reference too; at most, if older versions are kept."""
    older = recipe.schedule.kind == "staged" or recipe.learner.updates_per_batch > 1 or recipe.num_kept_versions > 0
    return build_scoring(recipe).passes(older=older) + (recipe.reference is not None)
