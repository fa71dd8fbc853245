"""Define the data of the loops: Prompt → Completion → Sample → Group → Batch.

A Batch is flat and ragged, as in its file: all tokens of all rows, one row after another, with offsets. A row is one
sequence that the learner runs. A sample of one turn is a row. An episode of several turns is one row too, with the
tokens of tools and users between its turns, and further rows where its conversation branched:

    row 0    user · TURN · tool · TURN       branch_of -1
    row 1    user · turn · user · TURN       branch_of 0, branched_at the tokens of the first two, which
             └───── prompt ────┘                  are trained in row 0 alone
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.data.routed_experts import ExpertShape, RoutedExperts

PER_RESPONSE_TOKEN = ("rollout_logprobs", "policy_version", "loss_mask")
"""The fields of Batch with one number per response token."""
FINISH_REASONS = ("stop", "length", "abort")
"""The reasons that `Batch.finish` indexes."""
FinishReason = Literal["stop", "length", "abort"]
SOLVED_REWARD = 1.0
"""The reward that solves a problem by default (`reward.solved_at`)."""
VERIFIER_FAILED = "verifier_failed"
"""The reward part of a sample without a reward."""
TEACHER_FAILED = "teacher_failed"
"""The reward part of a sample that the teacher of a distillation did not score. It may have a reward."""
ENVIRONMENT_FAILED = "environment_failed"
"""The reward part of an episode whose environment failed, and which therefore has no reward."""
WITHOUT_REWARD = (VERIFIER_FAILED, ENVIRONMENT_FAILED)
OWN_PARTS = frozenset((*WITHOUT_REWARD, TEACHER_FAILED))
DropKind = Literal["unfit", "zero_variance", "filtered", "solved", "failed"]
"""unfit: cannot be asked. zero_variance: all rewards are equal, and another group took its place. filtered: refused by
the user's prompts.group_filter. solved: its problem is solved too often to be asked again. failed: the environment or
agent of an episode failed twice."""
PASSED_OVER = ("solved_groups", "solved_problems")
"""The arrays with a batch's groups of solved problems, int64 [passed over]: they may be too many for attributes."""


class TokenKind(IntEnum):
    """The origin of a token of an episode."""

    SAMPLED = 0
    TEMPLATE = 1
    """Headers, ends of messages that no engine sampled, generation prompts."""
    USER = 2
    TOOL = 3
    SYSTEM = 4
    REPEATED = 5
    """Sampled, but trained in another row."""


class StopReason(IntEnum):
    """Why an episode ended. After the first come the budgets, then the faults."""

    FINISHED = 0
    TURNS = 1
    TOKENS = 2
    TOOL_CALLS = 3
    WALL_CLOCK = 4
    OBSERVATION = 5
    """A message of the environment was too long."""
    CONTEXT = 6
    """The model's context has no room for another turn."""
    AGENT_FAILED = 7
    """The policy is to blame, so the episode has a reward."""
    ENVIRONMENT_FAILED = 8

    @property
    def is_cut(self) -> bool:
        """Whether a budget ended the episode."""
        return StopReason.FINISHED < self < StopReason.AGENT_FAILED


def is_solved(reward: Sequence[float] | NDArray[np.float32], solved_at: float) -> NDArray[np.bool_]:
    """Return [n] whether each reward solves its problem; in float32, as stored, .7 + .2 + .1 reaches 1."""
    return np.asarray(reward, np.float32) >= np.float32(solved_at)


@dataclass(frozen=True, kw_only=True)
class LogprobContract:
    """The meaning of a stored log-probability. A learner refuses a batch with another contract.

    The distribution is softmax(logits / temperature), over the whole vocabulary before any cut (SGLang's convention).
    With `kept_set`, it is renormalized over the tokens that top-p and top-k left, as the engine sampled it; these
    tokens are stored too (Batch.kept). Token ids are those of the tokenizer with this digest.
    """

    temperature: float
    top_p: float
    top_k: int
    tokenizer_sha256: str
    kept_set: bool = False


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """An engine's sampling settings. `top_k` -1 means the whole vocabulary; with `kept_set`, the most tokens that an
    engine can name (pipeline.config.sections.MOST_KEPT)."""

    max_new_tokens: int
    vocab_size: int | None = None
    """The model's vocabulary size, above all ids; None: unknown."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_tokens: tuple[int, ...] = ()
    """Ids that end a response, beside the model's own."""
    experts: ExpertShape | None = None
    """The model's mixture, where engines report the experts of each token; None: they do not."""
    kept_set: bool = False
    """Whether engines report the tokens that top_p and top_k left, and log-probabilities are over these tokens."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A task instance. `group` is its place in the run's order, unique within the run."""

    group: int
    text: str
    answer: str
    tokens: tuple[int, ...]
    problem: int = -1
    """The task's problem, which recurs every epoch; -1: none (held out, made up)."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's further data, for the reward."""
    source: str = ""
    """The task's source; empty for a task with one source."""
    reward: str = ""
    """The name of its verifier in the collector."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation of which `tokens` are the rendering; empty: `text` is the user's message."""

    @property
    def conversation(self) -> tuple[Mapping[str, Any], ...]:
        """The messages with which an episode begins."""
        return self.messages or (dict(role="user", content=self.text),)


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptSets:
    """A set of token ids for each of n response tokens, ragged; empty for a token that no engine sampled."""

    offsets: NDArray[np.int64]
    """[n + 1] start of each token's set in `tokens`."""
    tokens: NDArray[np.int32]
    """[kept] token ids, ascending within a set."""

    @staticmethod
    def of(sets: Sequence[Sequence[int]]) -> KeptSets:
        """Build from a sequence of ids per token, in any order."""
        counts = np.fromiter(map(len, sets), np.int64, len(sets))
        tokens = np.fromiter(chain.from_iterable(sets), np.int32, int(counts.sum()))
        owner = np.repeat(np.arange(len(sets)), counts)
        return KeptSets(offsets=offsets_of(counts), tokens=tokens[np.lexsort((tokens, owner))])

    @staticmethod
    def empty(num_tokens: int) -> KeptSets:
        """Return empty sets, for tokens that no engine sampled."""
        return KeptSets(offsets=np.zeros(num_tokens + 1, np.int64), tokens=np.zeros(0, np.int32))

    @staticmethod
    def joined(parts: Sequence[KeptSets]) -> KeptSets:
        counts = np.concatenate([np.zeros(0, np.int64), *(part.counts for part in parts)])
        return KeptSets(
            offsets=offsets_of(counts), tokens=np.concatenate([np.zeros(0, np.int32), *(part.tokens for part in parts)])
        )

    def __len__(self) -> int:
        """Return the number of response tokens."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> NDArray[np.int64]:
        """[n] number of ids in each set."""
        return np.diff(self.offsets)

    def take(self, places: NDArray[np.int64]) -> KeptSets:
        """Return the sets at `places` [m], in that order; a place of -1 gives an empty set."""
        counts = np.where(places < 0, 0, np.append(self.counts, 0)[places])
        offsets = offsets_of(counts)
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        return KeptSets(offsets=offsets, tokens=self.tokens[np.repeat(self.offsets[places], counts) + within])

    def check(self, tokens: NDArray[np.int32], sampled: NDArray[np.bool_]) -> None:
        """Raise ValueError unless the set of each `sampled` [n] token in `tokens` [n] contains it, others are empty."""
        for name, array, dtype in (("kept_offsets", self.offsets, np.int64), ("kept_tokens", self.tokens, np.int32)):
            if array.dtype != dtype or array.ndim != 1:
                raise ValueError(f"{name} is {array.dtype} with {array.ndim} axes, expected {np.dtype(dtype)} with 1")
        if len(self.offsets) != len(tokens) + 1:
            raise ValueError(f"kept_offsets has {len(self.offsets)} entries, expected {len(tokens) + 1}")
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens) or np.any(self.counts < 0):
            raise ValueError(f"kept_offsets does not rise from 0 to the {len(self.tokens)} kept tokens")
        owner = np.repeat(np.arange(len(self)), self.counts)
        if np.any(self.tokens < 0) or np.any((np.diff(self.tokens) <= 0) & (np.diff(owner) == 0)):
            raise ValueError("kept_tokens holds a negative id, or a set is not ascending")
        if np.any(self.counts[~sampled] > 0):
            raise ValueError("a token outside loss_mask has a kept set, expected an empty one: no engine sampled it")
        held = np.zeros(len(self), np.bool_)
        held[owner[self.tokens == tokens[owner]]] = True
        if missing := np.flatnonzero(sampled & ~held).tolist():
            raise ValueError(
                f"{len(missing)} sampled tokens are not in their own kept set, the first is response token {missing[0]}"
            )


def offsets_of(lengths: ArrayLike) -> NDArray[np.int64]:
    """Return [n + 1] starts of n pieces with these `lengths` [n], and the end of the last."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """An engine's answer, as tokens. An interruption may have added tokens that no engine sampled."""

    tokens: NDArray[np.int32]
    """[tokens] ids."""
    logprobs: NDArray[np.float32]
    """[tokens] natural log, under the run's LogprobContract; 0.0 for a token that no engine sampled."""
    versions: NDArray[np.int32]
    """[tokens] policy version of each token; an unsampled token has that of the token before."""
    loss_mask: NDArray[np.bool_]
    """[tokens] False where no engine sampled the token."""
    finish: FinishReason
    engine: int
    queued_s: float
    generated_s: float
    kept: KeptSets | None = None
    """The tokens that top-p and top-k left at each position; None: not requested."""
    experts: RoutedExperts | None = None
    """The experts of the prompt's and these tokens; None: not requested."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """[tokens] natural log, of a teacher at temperature 1; None without a teacher."""
    kinds: NDArray[np.uint8] | None = None
    """[tokens] the TokenKind of each token of a row of an episode; None: a sample of one turn."""
    retractions: int = 0
    """How often it lost its keys and values to other requests, and was prefilled again."""
    cached_tokens: int = 0
    """Tokens of its prompt that the engine did not prefill: their keys and values were there."""

    distinct_versions: tuple[int, ...] = field(init=False)
    """The distinct `versions`, ascending; computed once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "distinct_versions", tuple(np.unique(self.versions).tolist()))

    def unlearned(self) -> Completion:
        """Return the same text with nothing to learn, as if no engine had sampled it."""
        return replace(
            self,
            logprobs=np.zeros_like(self.logprobs),
            loss_mask=np.zeros_like(self.loss_mask),
            kept=None if self.kept is None else KeptSets.empty(len(self.tokens)),
            teacher_logprobs=None if self.teacher_logprobs is None else np.zeros_like(self.teacher_logprobs),
        )

    @staticmethod
    def joined(answers: Sequence[Completion], given: Sequence[Sequence[int]]) -> Completion:
        """Return one completion of all `answers`, each sampled behind those before it, with the tokens given[i], which
        no engine sampled, in front of answers[i + 1]. `finish` and `engine` are those of the last answer."""
        parts = [answers[0]]
        pieces = [] if answers[0].experts is None else [answers[0].experts]
        for said, answer in zip(given, answers[1:], strict=True):
            parts += [Completion.given(said, (0.0,) * len(said), int(parts[-1].versions[-1])).unlearned(), answer]
            if answer.experts is not None:
                # The experts with which each token was sampled or, if given, first read. Later requests prefilled it
                # again, or read it from the cache. The last token of an answer is read by the next request only.
                pieces.append(answer.experts[len(answer.experts) - len(said) - len(answer.tokens) - 1 :])
        kept = [KeptSets.empty(len(part.tokens)) if part.kept is None else part.kept for part in parts]
        return Completion(
            tokens=np.concatenate([part.tokens for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            versions=np.concatenate([part.versions for part in parts]),
            loss_mask=np.concatenate([part.loss_mask for part in parts]),
            finish=answers[-1].finish,
            engine=answers[-1].engine,
            queued_s=sum(part.queued_s for part in answers),
            generated_s=sum(part.generated_s for part in answers),
            retractions=sum(part.retractions for part in answers),
            kept=None if any(answer.kept is None for answer in answers) else KeptSets.joined(kept),
            experts=RoutedExperts.joined([*(piece[: len(piece) - 1] for piece in pieces[:-1]), pieces[-1]])
            if len(pieces) == len(answers)
            else None,
        )

    @staticmethod
    def given(tokens: Sequence[int], logprobs: Sequence[float], version: int = 0) -> Completion:
        """Build from tokens that no engine sampled: a demonstration, or a batch made up to compare learners."""
        return Completion(
            tokens=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            versions=np.broadcast_to(np.int32(version), len(tokens)),
            loss_mask=np.broadcast_to(np.True_, len(tokens)),
            finish="stop",
            engine=0,
            queued_s=0.0,
            generated_s=0.0,
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence of an episode. Its completion begins with the first token that is trained in this row and ends with
    the last; a turn is a run of such tokens, and two turns have a token of another kind between them."""

    prompt: tuple[int, ...]
    """All tokens before the completion."""
    completion: Completion
    branch_of: int = -1
    """The earlier row of the episode from which this one branched; -1: none."""
    branched_at: int = 0
    """The number of tokens, all of the prompt, that the row repeats from the beginning of that row."""


@dataclass(frozen=True, kw_only=True)
class EpisodeFacts:
    stopped: StopReason
    turns: int
    """Sampled turns, over all rows."""
    tool_calls: int = 0
    """The policy's calls, whoever answered them."""
    tool_s: float = 0.0
    """Seconds in tools and environment."""
    turn_rewards: tuple[float, ...] = ()
    """Reward of each turn, in the order of the rows and their turns, NaN for none; empty: of the episode alone."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A scored attempt at a prompt: a completion, or an episode of several turns. `reward_parts` explains the reward.
    After a failed verifier or environment (parts `verifier_failed` and `environment_failed`, and a meaningless reward
    of 0.0) or teacher (part `teacher_failed`), nothing is learned from it."""

    completion: Completion
    """Of the first row."""
    reward: float
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    prompt: tuple[int, ...] | None = None
    """The tokens before the first row's completion; None: the group's prompt."""
    branches: tuple[Row, ...] = ()
    """The rows after the first."""
    episode: EpisodeFacts | None = None
    """None: a sample of one turn."""
    judged: bool = field(init=False)
    """Whether the sample has a reward."""

    def __post_init__(self) -> None:
        failed = any(self.reward_parts.get(name, 0.0) != 0.0 for name in WITHOUT_REWARD)
        object.__setattr__(self, "judged", not failed)

    def rows(self, prompt: Prompt) -> tuple[Row, ...]:
        """Return all rows of an attempt at `prompt`."""
        before = prompt.tokens if self.prompt is None else self.prompt
        return (Row(prompt=before, completion=self.completion), *self.branches)

    @property
    def answer_tokens(self) -> int:
        """The number of tokens of the response; of an episode, of those that were sampled in its turns."""
        if self.episode is None:
            return len(self.completion.tokens)
        kinds = [one.kinds for one in (self.completion, *(row.completion for row in self.branches))]
        return sum(int(np.count_nonzero(each == TokenKind.SAMPLED)) for each in kinds if each is not None)

    @staticmethod
    def of_episode(
        rows: Sequence[Row], facts: EpisodeFacts, reward: float, reward_parts: Mapping[str, float]
    ) -> Sample:
        """Build from at least one row, the first without a branch. Nothing is learned if the environment or verifier
        failed."""
        if facts.stopped is StopReason.ENVIRONMENT_FAILED:
            reward_parts = {**reward_parts, ENVIRONMENT_FAILED: 1.0}
        first, *branches = rows
        found = Sample(
            completion=first.completion,
            reward=reward,
            reward_parts=reward_parts,
            prompt=first.prompt,
            branches=tuple(branches),
            episode=facts,
        )
        if found.judged:
            return found
        masked = tuple(replace(row, completion=row.completion.unlearned()) for row in branches)
        return replace(found, completion=first.completion.unlearned(), branches=masked)


@dataclass(frozen=True, kw_only=True)
class Group:
    prompt: Prompt
    samples: tuple[Sample, ...]

    @property
    def rewards(self) -> NDArray[np.float32]:
        """[judged] float32 rewards of the samples that have one."""
        return np.array([sample.reward for sample in self.samples if sample.judged], np.float32)


@dataclass(frozen=True, kw_only=True)
class DroppedGroup:
    """A group that will never be trained on, recorded in the batch for which it was asked."""

    group: int
    reason: str
    kind: DropKind = "unfit"
    problem: int = -1
    samples: int = 0
    """The number of samples scored before the drop; they count for the problem's pass rate."""
    solved: int = 0
    """The number of these samples that solved the problem."""

    @property
    def is_passed_over(self) -> bool:
        """Whether group and problem determine all fields."""
        return self.kind == "solved" and self == DroppedGroup.passed_over(self.group, self.problem)

    @staticmethod
    def passed_over(group: int, problem: int) -> DroppedGroup:
        """Return the dropped group of a solved problem: group and problem determine all fields."""
        return DroppedGroup(group=group, reason=f"problem {problem} is solved", kind="solved", problem=problem)


@dataclass(frozen=True, kw_only=True, eq=False)
class Episodes:
    """The episodes of a batch of n rows. The rows of an episode are adjacent and in one group. All of them have its
    reward, its parts and `truncated`, so that a row can be read alone; what counts samples counts the first ones."""

    number: NDArray[np.int64]
    """[n] the episode of each row, from 0."""
    branch_of: NDArray[np.int32]
    """[n] the earlier row of the same episode, counted in the batch, from which the row branched; -1: none."""
    branched_at: NDArray[np.int32]
    """[n] the number of tokens, all of the prompt, that the row repeats from the beginning of that row."""
    turns: NDArray[np.int32]
    """[n] turns that are sampled in the row."""
    stopped: NDArray[np.uint8]
    """[n] StopReason of the episode."""
    tool_calls: NDArray[np.int32]
    """[n] of the episode."""
    tool_s: NDArray[np.float32]
    """[n] seconds of the episode in tools and environment."""
    turn_rewards: NDArray[np.float32] | None = None
    """[turns] of the turns of all rows, in order; NaN: none. None: no environment gave any."""

    def select(self, rows: NDArray[np.bool_]) -> Episodes:
        """Return the rows marked in `rows` [n], numbered anew. Without the row that it branched from, a row has no
        branch."""
        place = np.cumsum(rows, dtype=np.int32) - 1
        left = np.where(rows, place, -1)
        branch_of = np.where(self.branch_of < 0, -1, left[self.branch_of])[rows].astype(np.int32)
        return Episodes(
            number=np.unique(self.number[rows], return_inverse=True)[1].astype(np.int64),
            branch_of=branch_of,
            branched_at=np.where(branch_of < 0, 0, self.branched_at[rows]).astype(np.int32),
            turns=self.turns[rows],
            stopped=self.stopped[rows],
            tool_calls=self.tool_calls[rows],
            tool_s=self.tool_s[rows],
            turn_rewards=None if self.turn_rewards is None else self.turn_rewards[np.repeat(rows, self.turns)],
        )


def turns_of(kinds: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [turns, 3] the row, first token and end (exclusive) of each turn: a longest run of sampled tokens in a
    row. `kinds` is [responses], `offsets` [n + 1] the start of each row's response."""
    sampled = np.concatenate([[False], kinds == TokenKind.SAMPLED, [False]])
    starts, ends = sampled[1:] & ~sampled[:-1], ~sampled[1:] & sampled[:-1]
    inner = offsets[1:-1]
    inner = inner[(inner > 0) & (inner < len(kinds))]
    both = inner[sampled[inner] & sampled[inner + 1]]  # the end of a row may touch the begin of the next
    starts[both], ends[both] = True, True
    first = np.flatnonzero(starts)
    return np.stack([np.searchsorted(offsets, first, side="right") - 1, first, np.flatnonzero(ends)], axis=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """The samples of each rank. Every rank knows all shares, so that each can plan for all."""

    ranks: NDArray[np.int64]
    """[n] the data parallel rank that takes each sample."""
    rank: int
    """The rank of this share."""

    held: NDArray[np.bool_] = field(init=False)
    """[n] True on the samples of this rank."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "held", np.asarray(self.ranks == self.rank))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A stored batch: n samples, `total` tokens (prompts and responses), `responses` response tokens. A rank may hold
    the tokens of some samples only (`share`), which `total` then counts. In a batch of episodes each of the n samples
    is a row, and an episode has one or more.

    Response tokens of sample i are tokens[sample_offsets[i] + prompt_lengths[i] : sample_offsets[i + 1]]; the
    per-response-token arrays are the concatenation of those spans over i (see `response_offsets`).
    """

    index: int
    tokens: NDArray[np.int32]
    """[total] token ids, prompt then response, sample after sample."""
    sample_offsets: NDArray[np.int64]
    """[n + 1] start of each sample in `tokens`."""
    prompt_lengths: NDArray[np.int32]
    """[n] tokens."""
    group: NDArray[np.int64]
    """[n] the group (prompt) of each sample; samples of a group are adjacent."""
    problem: NDArray[np.int64]
    """[n] the group's problem in the task; -1 if unknown."""
    rollout_logprobs: NDArray[np.float32]
    """[responses] natural log, under `contract`; a meaningless 0.0 where `loss_mask` is False."""
    policy_version: NDArray[np.int32]
    """[responses]"""
    loss_mask: NDArray[np.bool_]
    """[responses] False for tokens that no engine sampled: the model reads them, but nothing is learned from them."""
    reward: NDArray[np.float32]
    """[n]"""
    reward_parts: Mapping[str, NDArray[np.float32]]
    """name → [n]; NaN for a sample without the part."""
    finish: NDArray[np.uint8]
    """[n] index into FINISH_REASONS."""
    truncated: NDArray[np.bool_]
    """[n] whether the response hit the token limit."""
    engine: NDArray[np.uint16]
    """[n]"""
    queued_s: NDArray[np.float32]
    """[n] seconds from the sample's first request to its answer, except generation."""
    generated_s: NDArray[np.float32]
    """[n] seconds, as reported by the engine."""
    contract: LogprobContract
    dropped: tuple[DroppedGroup, ...]
    next_group: int
    """The first group that no batch had taken at the commit."""
    recipe_sha256: str
    """Digest of the recipe file that it was sampled by (RecipeInForce.sha256), unique to the run."""
    open_groups: tuple[int, ...] = ()
    """Ascending: groups below `next_group` in no batch up to this one: in progress for later batches at the commit."""
    kept: KeptSets | None = None
    """[responses of the held samples] sets of the contract's distribution; None: the whole vocabulary."""
    experts: RoutedExperts | None = None
    """[total] the experts of each token, for a learner that replays them; None: not requested."""
    sources: Mapping[str, range] = field(default_factory=dict)
    """Name → problems of each source of the task; empty for one source."""
    repeated: int = 0
    """Samples, of dropped groups too, that repeat another against all odds (batch_builder.num_repeated)."""
    bias: Mapping[str, float] = field(default_factory=dict)
    """What is trained against what was issued, over the newest batches (pipeline.rollout.bias): lines of metrics."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """[responses] natural log, of a teacher at temperature 1; 0.0 where `loss_mask` is False. None: no teacher."""
    episodes: Episodes | None = None
    """The episodes of several turns; None: each sample is an episode of one turn."""
    token_kind: NDArray[np.uint8] | None = None
    """[responses] TokenKind, exactly where there are `episodes`."""
    reference_logprobs: NDArray[np.float32] | None = None
    """[responses] natural log, of the reference policy; never stored."""
    share: Share | None = None
    """The held samples; None: all. `tokens`, `kept` and `experts` hold only these. Everything else covers all samples;
    other samples' numbers per response token (`numbers`) are 0 until the ranks exchange them."""

    num_samples: int = field(init=False, repr=False)
    num_response_tokens: int = field(init=False, repr=False)
    num_sampled_tokens: int = field(init=False, repr=False)
    """Response tokens that an engine sampled."""
    lengths: NDArray[np.int64] = field(init=False, repr=False)
    """[n] tokens of prompt and response."""
    response_lengths: NDArray[np.int64] = field(init=False, repr=False)
    """[n] tokens."""
    response_offsets: NDArray[np.int64] = field(init=False, repr=False)
    """[n + 1] start of each sample's response in the per-response-token arrays."""
    num_episodes: int = field(init=False, repr=False)
    episode: NDArray[np.int64] = field(init=False, repr=False)
    """[n] the episode of each sample, ascending from 0."""
    first_rows: NDArray[np.int64] = field(init=False, repr=False)
    """[episodes] the first sample of each episode."""
    episode_offsets: NDArray[np.int64] = field(init=False, repr=False)
    """[episodes + 1] start of each episode's responses, one after another, in the per-response-token arrays."""
    held: NDArray[np.bool_] = field(init=False, repr=False)
    """[n] whether the sample's tokens are held here."""
    numbers: tuple[str, ...] = field(init=False, repr=False)
    """The stored fields with one number per response token."""

    def __post_init__(self) -> None:
        """Compute the derived fields. Raises ValueError where samples and offsets disagree."""
        lengths, samples = np.asarray(np.diff(self.sample_offsets), np.int64), len(self.prompt_lengths)
        if lengths.shape != self.prompt_lengths.shape:
            raise ValueError(f"sample_offsets has {len(self.sample_offsets)} entries, expected {samples + 1}")
        response_lengths = lengths - self.prompt_lengths
        response_offsets, first_rows = offsets_of(response_lengths), np.arange(samples)
        if self.episodes is not None:
            if self.episodes.number.shape != (samples,):
                raise ValueError(f"episode_number is {self.episodes.number.shape}, expected ({samples},)")
            first_rows = np.flatnonzero(np.diff(self.episodes.number, prepend=-1))
        found: dict[str, Any] = dict(
            num_samples=samples,
            num_response_tokens=len(self.rollout_logprobs),
            num_sampled_tokens=int(np.count_nonzero(self.loss_mask)),
            lengths=lengths,
            response_lengths=response_lengths,
            response_offsets=response_offsets,
            num_episodes=len(first_rows),
            episode=np.repeat(np.arange(len(first_rows)), np.diff(first_rows, append=samples)),
            first_rows=first_rows,
            episode_offsets=response_offsets[np.append(first_rows, samples)],
            held=np.ones(samples, np.bool_) if self.share is None else self.share.held,
            numbers=(
                *PER_RESPONSE_TOKEN,
                *(name for name in ("teacher_logprobs", "token_kind") if getattr(self, name) is not None),
            ),
        )
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def judged(self) -> NDArray[np.bool_]:
        """[n] False where verifier or environment failed, so that the sample has no reward."""
        found = np.ones(self.num_samples, np.bool_)
        for name in WITHOUT_REWARD:
            if (failed := self.reward_parts.get(name)) is not None:
                found &= np.isnan(failed) | (failed == 0.0)
        return found

    @property
    def interrupted(self) -> NDArray[np.bool_]:
        """[n] whether a sample of one turn has response tokens that no engine sampled."""
        found = np.zeros(len(self.response_offsets) - 1, np.bool_)
        if self.episodes is None:
            found[np.searchsorted(self.response_offsets, np.flatnonzero(~self.loss_mask), side="right") - 1] = True
        return found

    @property
    def own_tokens(self) -> NDArray[np.bool_]:
        """[responses] whether the token is part of an answer: all are, but in an episode only those of its turns."""
        if self.token_kind is None:
            return np.ones(self.num_response_tokens, np.bool_)
        return np.asarray(self.token_kind == TokenKind.SAMPLED)

    @property
    def places(self) -> NDArray[np.int32]:
        """[responses] the number of `own_tokens` of the same episode that are before each token."""
        before = np.concatenate([[0], np.cumsum(self.own_tokens)])
        starts = np.repeat(before[self.episode_offsets[:-1]], np.diff(self.episode_offsets))
        return np.asarray(before[:-1] - starts, np.int32)

    @property
    def answer_lengths(self) -> NDArray[np.int64]:
        """[episodes] `own_tokens` of each episode."""
        return np.diff(np.concatenate([[0], np.cumsum(self.own_tokens)])[self.episode_offsets])

    @property
    def response_tokens(self) -> NDArray[np.int32]:
        """[responses of the held samples] token ids."""
        lengths = self.lengths[self.held]
        starts, prompts = np.cumsum(lengths) - lengths, self.prompt_lengths[self.held]
        of_responses = np.ones(len(self.tokens), np.bool_)
        for start, length in zip(starts.tolist(), prompts.tolist(), strict=True):
            of_responses[start : start + length] = False
        return self.tokens[of_responses]

    def rows(self) -> list[NDArray[np.int32]]:
        """Return [n] the tokens of prompt and response of each sample; empty for samples not held."""
        ends = np.cumsum(np.where(self.held, self.lengths, 0)).tolist()
        return [self.tokens[start:end] for start, end in pairwise([0, *ends])]

    def sample_tokens(self, sample: int) -> NDArray[np.int32]:
        """Return prompt and response tokens of a sample, in a batch that holds all."""
        return self.tokens[self.sample_offsets[sample] : self.sample_offsets[sample + 1]]

    def alone(self) -> Batch:
        """Return a batch of the held samples alone."""
        return self if self.share is None else replace(self.select(self.held), share=None)

    def select(self, samples: NDArray[np.bool_]) -> Batch:
        """Return a batch of the samples marked in `samples` [n], in order, held as before. The collection's fields
        (`dropped`, `next_group`, `open_groups`) stay those of the whole batch."""
        of_held = samples[self.held]
        tokens = np.repeat(of_held, self.lengths[self.held])
        kept = np.flatnonzero(np.repeat(of_held, self.response_lengths[self.held]))
        responses = np.repeat(samples, self.response_lengths)
        per_sample = ("prompt_lengths", "group", "problem", "reward", "finish", "truncated", "engine", "queued_s")
        changes: dict[str, Any] = {name: getattr(self, name)[responses] for name in self.numbers}
        changes |= {name: getattr(self, name)[samples] for name in (*per_sample, "generated_s")}
        return replace(
            self,
            share=None if self.share is None else replace(self.share, ranks=self.share.ranks[samples]),
            tokens=self.tokens[tokens],
            kept=None if self.kept is None else self.kept.take(kept),
            experts=None if self.experts is None else self.experts[tokens],
            reference_logprobs=None if self.reference_logprobs is None else self.reference_logprobs[responses],
            episodes=None if self.episodes is None else self.episodes.select(samples),
            sample_offsets=offsets_of(self.lengths[samples]),
            reward_parts={name: values[samples] for name, values in self.reward_parts.items()},
            **changes,
        )

    @staticmethod
    def from_groups(
        index: int,
        groups: Sequence[Group],
        *,
        contract: LogprobContract,
        dropped: Sequence[DroppedGroup],
        next_group: int,
        recipe_sha256: str,
        open_groups: Sequence[int] = (),
        sources: Mapping[str, range] | None = None,
        repeated: int = 0,
        bias: Mapping[str, float] | None = None,
    ) -> Batch:
        """Flatten scored groups, in the given order. Slow, with millions of tokens: run it in a thread. Raises
        ValueError for an episode whose rows have not its number of turns."""
        rows = [
            (g.prompt, s, row.prompt, row.completion) for g in groups for s in g.samples for row in s.rows(g.prompt)
        ]
        prompts = [np.array(before, np.int32) for _, _, before, _ in rows]
        lengths = [len(before) + len(c.tokens) for _, _, before, c in rows]
        names = sorted({name for _, s, _, _ in rows for name in s.reward_parts})
        kinds, episodes = _episodes_of([s for g in groups for s in g.samples])
        taught = [c.teacher_logprobs for _, _, _, c in rows if c.teacher_logprobs is not None]
        # An engine that failed to report kept sets leaves empty sets, which no store commits.
        kept = [KeptSets.empty(len(c.tokens)) if c.kept is None else c.kept for _, _, _, c in rows]
        per_sample: dict[str, Any] = dict(
            prompt_lengths=np.array([len(before) for before in prompts], np.int32),
            group=np.array([p.group for p, _, _, _ in rows], np.int64),
            problem=np.array([p.problem for p, _, _, _ in rows], np.int64),
            reward=np.array([s.reward for _, s, _, _ in rows], np.float32),
            reward_parts={
                name: np.array([s.reward_parts.get(name, np.nan) for _, s, _, _ in rows], np.float32) for name in names
            },
            finish=np.array([FINISH_REASONS.index(c.finish) for _, _, _, c in rows], np.uint8),
            truncated=np.array([_is_truncated(s) for _, s, _, _ in rows], np.bool_),
            engine=np.array([c.engine for _, _, _, c in rows], np.uint16),
            queued_s=np.array([c.queued_s for _, _, _, c in rows], np.float32),
            generated_s=np.array([c.generated_s for _, _, _, c in rows], np.float32),
        )
        return Batch(
            index=index,
            tokens=_joined(
                np.int32, [part for p, (_, _, _, c) in zip(prompts, rows, strict=True) for part in (p, c.tokens)]
            ),
            sample_offsets=offsets_of(np.array(lengths, np.int64)),
            rollout_logprobs=_joined(np.float32, [c.logprobs for _, _, _, c in rows]),
            policy_version=_joined(np.int32, [c.versions for _, _, _, c in rows]),
            loss_mask=_joined(np.bool_, [c.loss_mask for _, _, _, c in rows]),
            contract=contract,
            dropped=tuple(dropped),
            next_group=next_group,
            recipe_sha256=recipe_sha256,
            open_groups=tuple(open_groups),
            kept=KeptSets.joined(kept) if contract.kept_set else None,
            experts=RoutedExperts.of_all([c.experts for _, _, _, c in rows], lengths),
            teacher_logprobs=_joined(np.float32, taught) if len(taught) == len(rows) > 0 else None,
            sources=dict(sources or {}),
            repeated=repeated,
            episodes=episodes,
            token_kind=kinds,
            bias=dict(bias or {}),
            **per_sample,
        )


def _is_truncated(sample: Sample) -> bool:
    """Return whether a limit of tokens cut the answer, or a budget the episode."""
    last = sample.branches[-1].completion if sample.branches else sample.completion
    return last.finish == "length" or (sample.episode is not None and sample.episode.stopped.is_cut)


def _episodes_of(samples: Sequence[Sample]) -> tuple[NDArray[np.uint8] | None, Episodes | None]:
    """Return the token kinds [responses] and the episodes of a batch; None where all samples are of one turn."""
    if all(sample.episode is None for sample in samples):
        return None, None
    kinds, number, branch_of, branched_at = list[NDArray[np.uint8]](), list[int](), list[int](), list[int]()
    facts, rewards = list[EpisodeFacts](), list[NDArray[np.float32]]()
    for place, sample in enumerate(samples):
        own = list[NDArray[np.uint8]]()
        first = len(number)
        for completion, at, shared in (
            (sample.completion, -1, 0),
            *((row.completion, row.branch_of, row.branched_at) for row in sample.branches),
        ):
            sampled = completion.loss_mask if completion.loss_mask.any() else ~completion.loss_mask  # unlearned
            given = np.where(sampled, np.uint8(TokenKind.SAMPLED), np.uint8(TokenKind.TEMPLATE))
            own.append(given if completion.kinds is None else completion.kinds)
            number.append(place)
            branch_of.append(at if at < 0 else first + at)
            branched_at.append(shared)
        turns = len(turns_of(np.concatenate(own), offsets_of([*map(len, own)])))
        known = sample.episode or EpisodeFacts(stopped=StopReason.FINISHED, turns=turns)
        if known.turns != turns or len(known.turn_rewards) not in (0, turns):
            raise ValueError(
                f"an episode of {known.turns} turns, with rewards of {len(known.turn_rewards)}, has {turns} turns in "
                f"its {len(own)} rows"
            )
        kinds += own
        facts += [known] * len(own)
        rewards.append(np.array(known.turn_rewards or [np.nan] * turns, np.float32))
    flat, offsets = np.concatenate(kinds), offsets_of([*map(len, kinds)])
    return flat, Episodes(
        number=np.array(number, np.int64),
        branch_of=np.array(branch_of, np.int32),
        branched_at=np.array(branched_at, np.int32),
        turns=np.bincount(turns_of(flat, offsets)[:, 0], minlength=len(number)).astype(np.int32),
        stopped=np.array([one.stopped for one in facts], np.uint8),
        tool_calls=np.array([one.tool_calls for one in facts], np.int32),
        tool_s=np.array([one.tool_s for one in facts], np.float32),
        turn_rewards=np.concatenate(rewards) if any(one.turn_rewards for one in facts) else None,
    )


def _joined(dtype: type[Any], parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts])  # also for no parts


class Response(NamedTuple):
    tokens: Sequence[int]
    logprobs: Sequence[float]
    """Natural log of each token, in place of the engine's."""
    reward: float
    learned: Sequence[bool] | None = None
    """Whether each token is learned. Default: all are."""


def given_batch(
    index: int, groups: Iterable[tuple[Sequence[int], Sequence[Response]]], contract: LogprobContract
) -> Batch:
    """Build batch `index` from (prompt tokens, responses), as if sampled with version `index`; groups are numbered from
    0. Log-probabilities are over the whole vocabulary, whatever the contract says of kept sets."""
    contract, built = replace(contract, kept_set=False), list[Group]()
    for number, (prompt, responses) in enumerate(groups):
        samples = []
        for one in responses:
            completion = Completion.given(one.tokens, one.logprobs, index)
            if one.learned is not None:
                completion = replace(completion, loss_mask=np.array(one.learned, np.bool_))
            samples.append(Sample(completion=completion, reward=one.reward))
        asked = Prompt(group=number, text="", answer="", tokens=tuple(prompt))
        built.append(Group(prompt=asked, samples=tuple(samples)))
    return Batch.from_groups(index, built, contract=contract, dropped=(), next_group=len(built), recipe_sha256="")
