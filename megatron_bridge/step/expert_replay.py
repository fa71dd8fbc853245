"""Replay the engine's choice of experts in the learner's routers.

    batch.experts ──this stage's layers, this rank's rows──▶ a target for each router and micro-batch
    router: the target where it is known, its own best where not ──▶ weights from its own scores, so gradients flow

The method is R3 ("Stabilizing MoE reinforcement learning by aligning training and inference routers"). Megatron-Core
0.16.1 asks `RouterReplay.get_replay_topk` for each token's experts (its fused router would not). Megatron's class
replays all rows or none; `ReplayedRouter` replays the known rows. Under recompute a router routes each micro-batch
twice: in its forward pass, which also queues the target, and in the backward pass, which takes the target from the
queue. Each model chunk sees its micro-batches in the same order in both passes, also when stages are interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.step.micro_batches import MicroBatch, Plan, TokenRows, to_device
from pipeline.data.routed_experts import RoutedExperts
from pipeline.errors import ExpertReplayError

UNKNOWN = -1
"""The expert id in a target that leaves the choice to the router."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Statistics of a replayed pass over all ranks, named as metrics."""

    experts_known_share: float
    """Share of the rows (a token in a layer) whose experts the engine recorded."""
    expert_rows_differ_share: float
    """Share of the known rows for which the learner would have chosen other experts."""
    expert_tokens_differ_share: float
    """Share of the known tokens that have a differing row in any layer."""


class ReplayedRouter(RouterReplay):  # type: ignore[misc]
    """A replacement of Megatron's RouterReplay that replays known rows. Without an action the router is unchanged."""

    def __init__(self, layer: int) -> None:
        """`layer` counts the model's layers with experts from 0."""
        super().__init__()
        self.layer = layer
        self.on_choice: Callable[[Tensor, Tensor], None] | None = None
        """Called in forward passes with the target and the router's choice, both int64 [tokens, k]."""
        self.target_topk_idx: Tensor | None
        self.replay_backward_list: list[Tensor]

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the chosen experts' scores and ids (int64), both [tokens, topk], from `scores` [tokens, experts]."""
        if self.router_replay_action in (None, RouterReplayAction.RECORD):
            found: tuple[Tensor, Tensor] = super().get_replay_topk(
                scores, topk, num_groups, group_topk, default_compute_topk
            )
            return found
        assert default_compute_topk is not None  # Megatron always gives it
        # Forward passes use each target once; with recompute, backward passes use it once more.
        target: Tensor | None
        if self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
            target, self.target_topk_idx = self.target_topk_idx, None
            if target is None:
                raise ExpertReplayError(f"layer {self.layer} routes a micro-batch twice in one forward pass")
        elif self.replay_backward_list:
            target = self.replay_backward_list.pop(0)
        else:
            raise ExpertReplayError(f"layer {self.layer} routes again more micro-batches than it has routed")
        if target.shape != (len(scores), topk):
            raise ExpertReplayError(
                f"layer {self.layer} routes {len(scores)} tokens to {topk} experts, but its target is "
                f"{tuple(target.shape)}; the micro-batch and its routes belong together: this is a bug, report it"
            )
        with torch.no_grad():
            _, live = default_compute_topk(scores.detach(), topk, num_groups, group_topk)
            target = target.to(scores.device, torch.int64)
            if self.on_choice is not None and self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
                self.on_choice(target, live)
            chosen = torch.where(target == UNKNOWN, live, target)
        return scores.gather(1, chosen), chosen


def install_replay(chunks: Sequence[Any], model_config: ModelConfig) -> dict[int, list[ReplayedRouter]]:
    """Give every router of the chunks a ReplayedRouter; return them by the chunk's `id` (none without experts)."""
    found: dict[int, list[ReplayedRouter]] = {}
    if model_config.experts is None:
        return found
    for chunk in chunks:
        routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
        for router in routers:
            # Every layer has experts. Megatron counts them from 1 over all pipeline stages.
            router.router_replay = ReplayedRouter(int(router.layer_number) - 1)
        found[id(chunk)] = [router.router_replay for router in routers]
    RouterReplay.clear_global_router_replay_instances()  # Megatron would keep all routers of all models alive there
    return found


class ExpertReplay:
    """The replay of one pass over one batch: `forward` around each micro-batch, `finish` at the end, `close` always."""

    def __init__(
        self,
        routers: Mapping[int, Sequence[ReplayedRouter]],
        experts: RoutedExperts,
        model_config: ModelConfig,
        *,
        recomputes: bool,
        sequence_parallel: bool,
        device: torch.device | str,
    ) -> None:
        """Raise ExpertReplayError if the experts were recorded from another model."""
        mixture = model_config.experts
        if mixture is None:
            raise ExpertReplayError(
                "the batch has routed experts, but the model has none; train the model that sampled it"
            )
        # A share's highest expert id was checked when it was read (Limits.num_experts), so no rank fails here alone.
        found, wanted = experts.ids.shape[1:], (model_config.num_layers, mixture.per_token)
        highest = int(experts.ids.max(initial=0))
        if found != wanted or highest >= mixture.count:
            raise ExpertReplayError(
                f"the batch routes over {found[0]} layers to {found[1]} experts a token, the highest is number "
                f"{highest}; the model has {wanted[0]} layers, {wanted[1]} of {mixture.count} experts a token: train "
                "the model that sampled it"
            )
        self._routers = routers
        self._experts = experts
        self._num_layers = model_config.num_layers
        self._recomputes = recomputes
        self._sequence_parallel = sequence_parallel
        self._device = device
        self._tensor_ranks = int(parallel_state.get_tensor_model_parallel_world_size())
        self._places = torch.zeros(0, dtype=torch.int64)
        # int32 [2, tokens + 1]: how many routers have routed the token, and how many of them would have chosen
        # otherwise. The additional entry gives padding a place to count, also on a rank without samples.
        self._counts = torch.zeros(2, len(experts) + 1, dtype=torch.int32, device=device)
        self.found: Replayed | None = None
        """The replay's statistics, once `finish` has run."""

    @contextmanager
    def forward(self, chunk: Any, micro_batch: MicroBatch) -> Iterator[None]:
        """Set the routers' targets during the forward pass of one chunk over one micro-batch (on the host)."""
        routers = self._routers[id(chunk)]
        rows, layers = micro_batch.places, [router.layer for router in routers]
        if self._sequence_parallel:  # a router sees only its tensor parallel rank's equal piece of the micro-batch
            rows = rows.reshape(self._tensor_ranks, -1)[parallel_state.get_tensor_model_parallel_rank()]
        known = rows >= 0
        known[known] = self._experts.known[rows[known]]
        chosen = np.full((len(rows), len(layers), self._experts.ids.shape[2]), UNKNOWN, np.int16)
        chosen[known] = self._experts.ids[rows[known]][:, layers]
        targets = to_device(torch.from_numpy(chosen), self._device)
        self._places = to_device(torch.from_numpy(rows), self._device)
        for router, target in zip(routers, targets.unbind(1), strict=True):
            router.on_choice = self._count
            router.set_target_indices(target)
            if not self._recomputes:
                router.replay_backward_list.clear()
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        try:
            yield
        finally:
            for router in routers:  # backward passes run between two forward passes
                router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        left = [router.layer for router in routers if router.target_topk_idx is not None]
        if left:
            raise ExpertReplayError(f"layers {left} did not route a micro-batch; their routers do not ask for replay")

    def close(self) -> None:
        """Restore the routers and drop what a failed pass left in them."""
        for routers in self._routers.values():
            for router in routers:
                router.clear_indices()
                router.clear_router_replay_action()
                router.on_choice = None

    def finish(self, rows: TokenRows, plan: Plan) -> None:
        """Check that every row was routed once, and compute the statistics. Collective over all ranks. Raises
        ExpertReplayError on all ranks unless each row (a token in a layer) of this pass was routed exactly once, no
        other row was, and under recompute each was routed again."""
        expected = np.repeat(plan.rows, rows.held_lengths)  # [tokens of the held rows]
        expected[rows.token_offsets[1:][rows.held_lengths > 0] - 1] = False  # a row's last token predicts nothing
        for group in (parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()):
            dist.all_reduce(self._counts, group=group)  # all ranks that work on the same samples
        counts = self._counts[:, :-1].cpu().numpy()
        copies = self._num_layers * (1 if self._sequence_parallel else self._tensor_ranks)
        known = self._experts.known & expected
        found = [counts[0] != np.where(expected, copies, 0), expected, known, counts[1], counts[1] != 0]
        totals = torch.tensor([int(each.sum()) for each in found], device=self._device)
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        waiting = sum(len(router.replay_backward_list) for routers in self._routers.values() for router in routers)
        left = torch.tensor(waiting, device=self._device)
        dist.all_reduce(left)
        wrong, num_expected, num_known, rows_differ, tokens_differ = totals.tolist()
        if wrong or int(left):
            raise ExpertReplayError(
                f"{wrong} rows, of {num_expected} that were to be, were not routed exactly once in each of "
                f"{self._num_layers} layers, and {int(left)} micro-batches were not routed again; nothing is trained "
                "on them: this is a bug, report it"
            )
        self.found = Replayed(
            experts_known_share=num_known / max(1, num_expected),
            expert_rows_differ_share=rows_differ / (copies * max(1, num_known)),
            expert_tokens_differ_share=tokens_differ / max(1, num_known),
        )

    def _count(self, target: Tensor, live: Tensor) -> None:
        routed = (self._places >= 0).to(torch.int32)
        known = target[:, 0] != UNKNOWN
        differs = known & (target.sort(dim=1).values != live.sort(dim=1).values).any(dim=1)
        places = self._places.clamp(min=0)
        self._counts[0].index_add_(0, places, routed)
        self._counts[1].index_add_(0, places, differs.to(torch.int32))
