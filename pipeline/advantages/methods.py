"""Advantages that compare the samples of a group, each a class with the keys of a recipe's section `advantage`.

Throughout, r is the reward and r̄ the mean of its group. Some formulas take any rewards. Formulas defined by a solve
rate read rewards clipped to [0, 1], so {0, 1} and {-1, 1} mean the same and partial credit stays partial. In a group of
equal rewards, and in a group of one, all advantages are exactly 0. Most formulas are fixed for a whole run; FADE
changes from step to step and keeps its state in an estimator. DAPO's length penalty and distillation follow.

With binary rewards, an advantage is w_S on successes and -w_F on failures, and the gradient at solve rate p = 1 - q is

    m_S E[∇log π | success] - m_F E[∇log π | failure],   m_S = p w_S,  m_F = q w_F

so two functions of p, the weight curves, tell two methods apart (arXiv 2607.01490). Their height over p shows which
difficulty is learned from; the ratio m_S / m_F shows how much failures are pushed down. Exactly on-policy only w_S +
w_F matters; the ratio acts through reuse, clipping and finite groups.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from pipeline.config.sections import Changes, ServerUrls
from pipeline.data.batch import SOLVED_REWARD
from pipeline.errors import CorruptCheckpointError, NonFiniteError, RecipeError
from precision.objectives.objective import Aggregation
from precision.settings import Settings

Rewards = NDArray[np.float32]
"""Reward of each sample, [n]."""


Groups = NDArray[np.int64]
"""Group (prompt) of each sample, [n], in any order."""


Curve = NDArray[np.float64]
"""Values at solve rates, [points]."""


class Grouped:
    """The samples of a batch by group. `values` [n] are float64; `members` [n] is the group of each sample, 0 … groups
    - 1; `sizes` is [groups]; `mean` [n] is that of the sample's group; `deviation` [n] is value minus mean. Sums of
    float32 numbers are exact in float64, so the deviation is exactly 0 in a group of equal values. A division by the
    standard deviation would turn a rounding into ±1."""

    def __init__(self, values: NDArray[Any], group: NDArray[np.int64], *, clip: bool = False) -> None:
        """Take `values` [n] and `group` [n], any numbers; `clip` clips the values to [0, 1], so that a group's mean is
        its solve rate. Raises NonFiniteError on a value that is NaN or infinite, ValueError when shapes differ."""
        if values.shape != group.shape or values.ndim != 1:
            raise ValueError(f"reward is {values.shape} and group is {group.shape}, expected the same [n]")
        if not np.isfinite(values).all():
            sample = int(np.flatnonzero(~np.isfinite(values))[0])
            raise NonFiniteError(
                f"reward of sample {sample} is {values[sample]}, expected a finite number; correct the reward function"
            )
        _, members, sizes = np.unique(group, return_inverse=True, return_counts=True)
        self.members, self.sizes = members.astype(np.int64), sizes.astype(np.int64)
        self.values = values.astype(np.float64).clip(0.0, 1.0) if clip else values.astype(np.float64)
        self.mean = np.asarray((self.total(self.values) / self.sizes)[self.members])
        self.deviation = self.values - self.mean

    def total(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Return the sums [groups] of any `values` [n] over each group."""
        return np.bincount(self.members, values, minlength=len(self.sizes)).astype(np.float64)

    def any_member(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return [n] whether any sample of the same group is `chosen` [n]."""
        return np.asarray(self.total(chosen)[self.members] > 0)


class Advantage(Settings, ABC):
    """Settings and formula of an advantage. A subclass must define `name` and `advantages`."""

    name: str
    aggregation: Aggregation = Field(
        "token",
        description="What counts alike in the mean: tokens (DAPO), responses (GRPO's paper), prompts with their tokens "
        "alike (ScaleRL), or tokens over a fixed length (Dr. GRPO: rollout.max_new_tokens). Default: that of the "
        "objective's paper, otherwise that of the advantage's, otherwise token.",
    )
    batch_normalized: bool = Field(False, description="Divide by the standard deviation over the batch (ScaleRL).")
    zero_variance: Literal["keep", "skip", "exclude"] = Field(
        "keep",
        description="Groups of equal rewards, which have no policy gradient. keep: trained on like the others. skip: "
        "not run through the learner, but counted in every denominator and batch statistic; the gradient is that of "
        "keep (refused with fade, which follows the entropy of all groups). exclude: no part of the loss, its "
        "denominators and the batch statistics (ScaleRL's effective batch).",
    )
    truncated: Literal["keep", "exclude"] = Field(
        "keep",
        description="Responses that were cut at rollout.max_new_tokens. keep: trained on like the others. exclude: not "
        "run through the learner, no part of the loss and its denominators (DAPO's overlong filtering); their rewards "
        "count in their groups.",
    )

    asks_what_is_solved: ClassVar[bool] = False
    """Whether the formula compares rewards with 1, or clips them to [0, 1]. Nothing may be added to its rewards, and
    they come divided by reward.solved_at."""
    moving_parts: ClassVar[tuple[str, ...]] = ()
    """Parts of the formula that change during a run, by their names in reports. With any, zero_variance skip is
    refused, since `observe` would get the entropy of some groups alone."""

    @abstractmethod
    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """Return the advantage [n] of each sample; 0 throughout a group of equal rewards. Raises NonFiniteError on a
        reward that is NaN or infinite."""

    @property
    def smallest_group(self) -> int:
        """Least number of samples of a prompt that the formula can use."""
        return 2

    def estimator(self) -> AdvantageEstimator:
        """Return the formula with its state at the beginning of a run."""
        return AdvantageEstimator(self)


class AdvantageEstimator:
    """An advantage formula with its state in a run; this base class has no state. Every rank feeds its copy the same
    numbers, so all ranks have the same advantages."""

    def __init__(self, section: Advantage) -> None:
        self.section = section

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """Return the advantages [n] from the batch and the present state alone; see `Advantage.advantages`."""
        return self.section.advantages(reward, group)

    def observe(self, *, solve_rate: float, entropy: float) -> None:
        """Update the state after a trained step, from the share of its samples that solved their problem and the
        policy's entropy in nats a token. Raises NonFiniteError on a number that is not finite."""

    def state(self) -> dict[str, float]:
        """Return the state that a checkpoint must hold for a resumed run to go on with the same formula."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore a state; an empty state is a new run's. Raises CorruptCheckpointError when a part is missing."""

    def measured(self) -> dict[str, float]:
        """Return the numbers in the next step's formula, by metric name; empty for a fixed formula."""
        return {}


def weight_curves(advantage: Advantage, p: Curve, group_size: int) -> tuple[Curve, Curve]:
    """Return the weight curves m_S and m_F (see the head of this file) at the solve rates `p` [points] in [0, 1]: the
    exact mean over groups of `group_size` samples with binomial numbers of successes. FADE's are of its first step."""
    solved, member = np.meshgrid(np.arange(group_size + 1), np.arange(group_size), indexing="ij")
    reward, group = (member < solved).astype(np.float32).ravel(), solved.astype(np.int64).ravel()
    each = advantage.advantages(reward, group).reshape(solved.shape) / group_size
    chance = np.array([math.comb(group_size, n) * p**n * (1.0 - p) ** (group_size - n) for n in range(group_size + 1)])
    success, failure = (np.where(kind, each, 0.0).sum(axis=1) for kind in (member < solved, member >= solved))
    return success @ chance, -failure @ chance


GRPO_EPSILON = 1e-6
"""Added to s, so that nearly equal rewards are not divided by nearly 0."""


class GRPO(Advantage):
    """The reward's z-score within its group: (r - r̄) / (s + 1e-6) (DeepSeekMath, arXiv 2402.03300, text at eq. 3). s
    is the sample standard deviation (ddof 1), as torch.std and the common GRPO trainers compute it; the paper does not
    say which is meant. The population one would scale every advantage by sqrt(G / (G - 1)), G the group size."""

    name: Literal["grpo"] = "grpo"

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        groups = Grouped(reward, group)
        variance = groups.total(groups.deviation**2) / np.maximum(groups.sizes - 1, 1)
        std = np.sqrt(variance)[groups.members]
        return groups.deviation / (std + GRPO_EPSILON)


class DrGRPO(Advantage):
    """r - r̄ (Dr. GRPO, arXiv 2503.20783); ScaleRL's with `batch_normalized`. The paper also divides the sum over
    tokens by a constant, hence the default of `aggregation`."""

    name: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = Field("constant", description=Advantage.model_fields["aggregation"].description)

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        return Grouped(reward, group).deviation


class RLOO(Advantage):
    """r minus the mean of the others, (r - r̄) G / (G - 1), G the group size (leave one out, arXiv 2402.14740)."""

    name: Literal["rloo"] = "rloo"

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        groups = Grouped(reward, group)
        factor = groups.sizes / np.maximum(groups.sizes - 1, 1)
        return groups.deviation * factor[groups.members]


class MaxRL(Advantage):
    """Maximum-likelihood RL (arXiv 2602.02710): (r - r̄) / r̄ of rewards clipped to [0, 1], and 0 in a group without
    any success. It is the gradient of log p up to order G - 1 of its expansion in pass@k."""

    asks_what_is_solved: ClassVar[bool] = True
    name: Literal["maxrl"] = "maxrl"

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        groups = Grouped(reward, group, clip=True)
        return groups.deviation / np.where(groups.mean > 0.0, groups.mean, 1.0)


class PassAtK(Advantage):
    """The unbiased gradient of pass@k with a leave-one-out baseline (arXiv 2505.15201).

    The advantage is k × (pass@k of subsets with the sample - pass@k of subsets without it), each averaged over all
    subsets of k, which needs G > k. With c of G samples solved:

        solved    k C(G - c, k) / C(G - 1, k)
        failed    k (C(G - c - 1, k) / C(G - 1, k) - C(G - c - 1, k - 1) / C(G - 1, k - 1))

    The baseline does not see the sample, so the gradient is unbiased; a group sums to 0; k = 1 is rloo.
    """

    asks_what_is_solved: ClassVar[bool] = True
    name: Literal["pass_at_k"] = "pass_at_k"
    k: PositiveInt = Field(4, description="Attempts of which one must succeed; below rollout.group_size.")

    @property
    def smallest_group(self) -> int:
        return self.k + 1

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """Return the advantages [n]; see `Advantage.advantages`. Raises RecipeError for a group of k or fewer."""
        groups = Grouped(reward, group)
        solved = groups.values >= SOLVED_REWARD
        if len(groups.sizes) and int(groups.sizes.min()) <= self.k:
            raise RecipeError(
                f"advantage.k is {self.k}, but a group has {int(groups.sizes.min())} samples and needs at least "
                f"{self.k + 1}; lower advantage.k or raise rollout.group_size"
            )
        k, failed, others = self.k, groups.sizes - groups.total(solved), groups.sizes - 1
        of_solved = k * _all_chosen(failed, others, k)
        of_failed = k * (_all_chosen(failed - 1, others, k) - _all_chosen(failed - 1, others, k - 1))
        return np.where(solved, of_solved[groups.members], of_failed[groups.members])


def _all_chosen(of_kind: NDArray[np.float64], total: NDArray[np.int64], k: int) -> NDArray[np.float64]:
    """Return the chance [groups] that k of `total` things, drawn without replacement, are all among `of_kind`:
    C(of_kind, k) / C(total, k), as a product because the binomials overflow."""
    chance = np.ones(len(total))
    for drawn in range(k):
        chance *= np.maximum(of_kind - drawn, 0.0) / (total - drawn)
    return chance


class FGRPO(Advantage):
    """grpo × (1 - r̄)^gamma, with r̄ of rewards clipped to [0, 1]: the weight falls with p (arXiv 2602.06717)."""

    asks_what_is_solved: ClassVar[bool] = True
    name: Literal["f_grpo"] = "f_grpo"
    gamma: float = Field(1.0, ge=0.0, description="The group's advantages are multiplied by (1 - solve rate)^gamma.")

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        failure_rate = 1.0 - Grouped(reward, group, clip=True).mean
        return GRPO().advantages(reward, group) * failure_rate**self.gamma


class AsymGRPO(Advantage):
    """r - r̄, divided by delta where negative (an ablation in FADE's paper, arXiv 2607.01490)."""

    name: Literal["asym_grpo"] = "asym_grpo"
    delta: PositiveFloat = Field(0.5, description="Negative advantages are divided by this.")

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        deviation = Grouped(reward, group).deviation
        return np.where(deviation < 0.0, deviation / self.delta, deviation)


class Power(Advantage):
    """FADE with fixed alpha and delta (an ablation in its paper): (1 - r̄)^(alpha - 1) × asym_grpo, of rewards clipped
    to [0, 1]. The weight falls with the solve rate."""

    asks_what_is_solved: ClassVar[bool] = True
    name: Literal["power"] = "power"
    alpha: float = Field(2.0, ge=1.0, description="Successes weigh p q^alpha: larger means harder prompts.")
    delta: PositiveFloat = Field(1.0, description="Negative advantages are divided by this.")

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        groups = Grouped(reward, group, clip=True)
        asymmetric = np.where(groups.deviation < 0.0, groups.deviation / self.delta, groups.deviation)
        return (1.0 - groups.mean) ** (self.alpha - 1.0) * asymmetric


FIRST_SOLVE_RATE = 0.5
"""Value of p̂ before any step."""


TARGET_SHARE = 0.5
"""H* as a share of the first step's entropy, where the recipe sets no target."""


class FADE(Advantage):
    """The Power advantage with alpha and delta that follow the run (arXiv 2607.01490).

        A     = (1 - r̄)^(alpha - 1) × { r - r̄ where r >= r̄, (r - r̄) / delta below }
        alpha = clip(3 (1 - p̂) / (2 p̂), 1, alpha_max)       3 while a third is solved, 1.5 at half, 1 from .6 on
        delta = clip(1 + Ĥ - H*, delta_min, 1)              below 1, failures push harder: the policy narrows too fast

    p̂ is the solve rate and Ĥ the entropy (nats a token) of the whole run, both smoothed by `FADEEstimator`. Successes
    then weigh m_S = p q^alpha, failures p q^alpha / delta; the peak is at p = 1 / (1 + alpha).

    Known from the paper: the formulas, alpha_max 3, delta_min .3, beta .02, p̂ starts at .5, Ĥ at the initial entropy;
    alpha follows the solve rate and delta the entropy. Its full text could not be read, so two things are options.
    `smoothing_keeps`: the published summary writes x ← beta x + (1 - beta) new, which with beta .02 hardly smooths at
    all. `target_entropy`: its tables have 1.0 and 1.3 nats, about half the initial entropy. r̄ is a mean of the batch
    there, but must be the group's for the weights above to come out.
    """

    name: Literal["fade"] = "fade"
    alpha_max: float = Field(3.0, ge=1.0, description="Largest alpha, while few prompts are solved.")
    delta_min: float = Field(0.3, gt=0.0, le=1.0, description="Smallest delta, while the policy narrows.")
    target_entropy: PositiveFloat | None = Field(None, description="H*, nats; default half the first step's entropy.")
    smoothing: float = Field(0.02, gt=0.0, le=1.0, description="beta: the share of a step in p̂ and Ĥ.")
    smoothing_keeps: Literal["old", "new"] = Field(
        "old", description="old: x ← (1 - beta) x + beta new, a window of 1/beta steps; new: the other way round."
    )

    asks_what_is_solved: ClassVar[bool] = True
    moving_parts: ClassVar[tuple[str, ...]] = ("alpha", "delta")

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """Return the advantages [n] at a run's first step."""
        return self.estimator().advantages(reward, group)

    def estimator(self) -> FADEEstimator:
        return FADEEstimator(self)


class FADEEstimator(AdvantageEstimator):
    """The state of FADE in a run. Until a first entropy is known, delta is 1."""

    def __init__(self, settings: FADE) -> None:
        super().__init__(settings)
        self._settings = settings
        self._solve_rate = FIRST_SOLVE_RATE
        self._entropy: float | None = None
        self._target = settings.target_entropy

    def as_power(self) -> Power:
        """Return the fixed advantage with the present alpha and delta."""
        # Written without the division by a solve rate that may be 0.
        if 3.0 * (1.0 - self._solve_rate) >= self._settings.alpha_max * 2.0 * self._solve_rate:
            alpha = self._settings.alpha_max
        else:
            alpha = max(1.0, 3.0 * (1.0 - self._solve_rate) / (2.0 * self._solve_rate))
        delta = 1.0
        if self._entropy is not None and self._target is not None:
            delta = min(1.0, max(self._settings.delta_min, 1.0 + self._entropy - self._target))
        return Power(alpha=alpha, delta=delta)

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        return self.as_power().advantages(reward, group)

    def observe(self, *, solve_rate: float, entropy: float) -> None:
        """Update p̂ and Ĥ by a step. Raises NonFiniteError on the entropy, ValueError for a rate outside [0, 1]."""
        if not math.isfinite(entropy):
            raise NonFiniteError(f"entropy of the step is {entropy}, expected a finite number of nats")
        if not 0.0 <= solve_rate <= 1.0:
            raise ValueError(f"solve_rate is {solve_rate}, expected a share in [0, 1]")
        beta = self._settings.smoothing
        share = beta if self._settings.smoothing_keeps == "old" else 1.0 - beta
        self._solve_rate += share * (solve_rate - self._solve_rate)
        self._entropy = entropy if self._entropy is None else self._entropy + share * (entropy - self._entropy)
        self._target = TARGET_SHARE * entropy if self._target is None else self._target

    def state(self) -> dict[str, float]:
        """Return p̂ and, from the first step on, Ĥ and H*."""
        known = {
            "advantage_solve_rate": self._solve_rate,
            "advantage_entropy": self._entropy,
            "advantage_target_entropy": self._target,
        }
        return {name: value for name, value in known.items() if value is not None}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore a state. Raises CorruptCheckpointError when p̂ is missing."""
        if state and "advantage_solve_rate" not in state:
            raise CorruptCheckpointError(
                f"the checkpoint holds {', '.join(sorted(state))} but no advantage_solve_rate, which FADE goes on "
                "from; the run was begun with another advantage: give this one another run.name"
            )
        self._solve_rate = state.get("advantage_solve_rate", FIRST_SOLVE_RATE)
        self._entropy = state.get("advantage_entropy")
        if self._settings.target_entropy is None:  # otherwise the recipe's holds: a fork may set another
            self._target = state.get("advantage_target_entropy")

    def measured(self) -> dict[str, float]:
        power = self.as_power()
        return self.state() | {"advantage_alpha": power.alpha, "advantage_delta": power.delta}


class OverlongPenalty(Settings):
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): a penalty on a response's reward for its length.

        0                                   up to L - C tokens
        penalty (L - C - tokens) / C        above, down to -penalty at L

    L is rollout.max_new_tokens, where engines cut (the paper's L_max, 20,480); C is its L_cache, 4,096. The paper's
    penalty of 1 goes with rewards of +1 and -1. With rewards of 1 and 0, 1/2 gives the same values to advantages that
    divide by a group's standard deviation. It is added where advantages are computed, not where rewards are stored: a
    long right answer still counts as solved in pass rates, in dynamic sampling (as in verl's DAPO) and in evaluations.
    """

    buffer_tokens: PositiveInt = Field(
        description="The penalty grows over so many tokens before rollout.max_new_tokens; DAPO a fifth of those "
        "(4,096 of 20,480)."
    )
    penalty: float = Field(
        1.0,
        gt=0.0,
        description="What a response of max_new_tokens loses. DAPO 1 with rewards of 1 and -1, which is 0.5 with "
        "rewards of 1 and 0.",
    )

    def of(self, lengths: NDArray[np.int64], *, max_new_tokens: int) -> NDArray[np.float32]:
        """Return the penalties [samples] of responses of `lengths` [samples] tokens, from -penalty to 0; an episode's
        are those of its sampled tokens."""
        beyond = lengths - (max_new_tokens - self.buffer_tokens)
        return np.asarray(-self.penalty * np.clip(beyond / self.buffer_tokens, 0.0, 1.0), np.float32)


class Distillation(Settings):
    """On-policy distillation: a teacher scores every token that the student sampled.

        A_t = reward_coefficient A_i + coefficient (log pi_teacher(y_t) - log pi_b(y_t))

    A_i is the advantage of the sample's reward, pi_b the distribution that the engine sampled the token from. The
    second term is minus the token's reverse KL, estimated on the token itself (Thinking Machines, "On-Policy
    Distillation", 2025; slime's `--opd-kl-coef`). In expectation over the policy's own samples, its gradient is that of
    -coefficient KL(pi || pi_teacher), given the tokens before. It stays fixed while the learner moves away from pi_b;
    an objective that weighs by pi / pi_b then follows - KL(pi || pi_teacher) + KL(pi || pi_b): the same way, but
    further. pi_b is softmax(logits / rollout.temperature), as stored. pi_teacher is at temperature 1, since servers do
    not scale the log-probabilities of given tokens, so the learner must train the sampled distribution, uncut.
    """

    on_resume: ClassVar[Changes] = dict.fromkeys(("urls", "tensor_parallel", "extra_args"), "free")

    path: Path | None = Field(
        None,
        description="HF folder of the teacher, with the student's tokenizer: a server is started beside the collector.",
    )
    urls: ServerUrls = Field(
        (), description="SGLang servers of the teacher that exist already: http://HOST:PORT of each; instead of path."
    )
    coefficient: float = Field(1.0, gt=0.0, description="Of the reverse KL of a token, in its advantage.")
    reward_coefficient: float = Field(
        0.0, ge=0.0, description="Of the advantage that comes from the rewards; 0: the teacher alone."
    )
    tensor_parallel: PositiveInt = Field(1, description="GPUs of the server that is started.")
    extra_args: tuple[str, ...] = Field(
        (), description="Passed to the SGLang that is started, as they are; none that another key says."
    )

    @model_validator(mode="after")
    def _one_teacher(self) -> Self:
        if (self.path is None) == (not self.urls):
            found = "neither path nor urls is" if self.path is None else "both path and urls are"
            raise ValueError(f"{found} given, expected one of them; set distillation.path, or distillation.urls")
        return self

    @property
    def judges_alone(self) -> bool:
        """Whether rewards count for nothing, so that samples of a prompt are not compared."""
        return self.reward_coefficient == 0.0
