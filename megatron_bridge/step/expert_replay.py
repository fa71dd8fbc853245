"""The experts that an engine chose, used again by the learner's routers (R3: "Stabilizing MoE reinforcement learning by
aligning training and inference routers").

    batch.experts ──this stage's layers, this rank's rows──▶ a target for each router and micro-batch
    router: the target where it is known, its own best where not ──▶ weights from its own scores, so gradients flow

Megatron-Core 0.16.1 asks `RouterReplay.get_replay_topk` for the experts of each token (its fused router would not).
Megatron's own class replays all rows or none; the one here replays the known rows. Under recompute a router is asked
twice for each micro-batch: in its forward pass, where the target is also queued, and in the backward pass, which takes
targets from the queue. Each model chunk sees its micro-batches in one order in both passes, also when pipeline stages
are interleaved.
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
from megatron_bridge.step.micro_batches import MicroBatch, Plan, TokenRows
from pipeline.data.routed_experts import RoutedExperts
from pipeline.errors import ExpertReplayError

UNKNOWN = -1
"""In a target: the router's own choice."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a pass found, over all ranks. The names are those of metrics."""

    experts_known_share: float
    """Rows (a token in a layer) whose experts the engine had recorded, of all that were run."""
    expert_rows_differ_share: float
    """Of the known ones, those in which the learner would have chosen other experts."""
    expert_tokens_differ_share: float
    """Of the known tokens, those with such a row in any layer."""


class ReplayedRouter(RouterReplay):  # type: ignore[misc]
    """Stands in a router for Megatron's own RouterReplay. Without an action the router is as it always was."""

    def __init__(self, layer: int) -> None:
        """`layer` counts the model's layers with experts from 0."""
        super().__init__()
        self.layer = layer
        self.on_choice: Callable[[Tensor, Tensor], None] | None = None
        """Called in forward passes with the target and with what the router would have chosen, int64 [tokens, k]."""
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
        """Scores [tokens, experts] → (the chosen ones [tokens, topk], which experts int64 [tokens, topk])."""
        if self.router_replay_action in (None, RouterReplayAction.RECORD):
            found: tuple[Tensor, Tensor] = super().get_replay_topk(
                scores, topk, num_groups, group_topk, default_compute_topk
            )
            return found
        assert default_compute_topk is not None  # Megatron always gives it
        # Each is given out once in forward passes, and once more in backward passes where there is recompute.
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
    """Give every router of these model chunks a ReplayedRouter. Returns them by the identity of the chunk; nothing for
    a model without experts."""
    found: dict[int, list[ReplayedRouter]] = {}
    if model_config.experts is None:
        return found
    for chunk in chunks:
        routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
        for router in routers:
            # Every layer has experts. Megatron counts them from 1 over all pipeline stages.
            router.router_replay = ReplayedRouter(int(router.layer_number) - 1)
        found[id(chunk)] = [router.router_replay for router in routers]
    RouterReplay.clear_global_router_replay_instances()  # Megatron would keep all routers of all models there
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
        """Raises ExpertReplayError when the record is of another model."""
        mixture = model_config.experts
        if mixture is None:
            raise ExpertReplayError(
                "the batch has routed experts, but the model has none; train the model that sampled it"
            )
        # The highest number of a share was compared when it was read (Limits.num_experts): no rank fails here alone.
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
        # int32 [2, tokens]: how many routers have routed the token, and how many of them would have chosen otherwise.
        # One more place, for padding is counted somewhere also on a rank without samples.
        self._counts = torch.zeros(2, len(experts) + 1, dtype=torch.int32, device=device)
        self.found: Replayed | None = None
        """Once `finish` has run."""

    @contextmanager
    def forward(self, chunk: Any, micro_batch: MicroBatch) -> Iterator[None]:
        """Around the forward pass of one chunk over one micro-batch (on the host)."""
        routers = self._routers[id(chunk)]
        places = micro_batch.places[0]
        if self._sequence_parallel:  # these routers see one of the equal pieces of the micro-batch
            places = places.view(self._tensor_ranks, -1)[parallel_state.get_tensor_model_parallel_rank()]
        rows, layers = places.numpy(), [router.layer for router in routers]
        known = rows >= 0
        known[known] = self._experts.known[rows[known]]
        chosen = np.full((len(rows), len(layers), self._experts.ids.shape[2]), UNKNOWN, np.int16)
        chosen[known] = self._experts.ids[rows[known]][:, layers]
        targets = torch.from_numpy(chosen).to(self._device)
        self._places = places.to(self._device)
        for router, target in zip(routers, targets.unbind(1), strict=True):
            router.on_choice = self._count
            router.set_target_indices(target)
            if not self._recomputes:
                router.replay_backward_list.clear()
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        try:
            yield
        finally:
            for router in routers:  # backward passes come between two forward passes
                router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        left = [router.layer for router in routers if router.target_topk_idx is not None]
        if left:
            raise ExpertReplayError(f"layers {left} did not route a micro-batch; their routers do not ask for replay")

    def close(self) -> None:
        """Let routers be as they always were; whatever a pass that failed has left is dropped."""
        for routers in self._routers.values():
            for router in routers:
                router.clear_indices()
                router.clear_router_replay_action()
                router.on_choice = None

    def finish(self, rows: TokenRows, plan: Plan) -> None:
        """Compare what was routed with what was to be. Collective over all ranks. Raises ExpertReplayError, on all of
        them, unless each row (a token in a layer) that this rank runs was routed exactly once and no other row was, and
        each was routed again where there is recompute."""
        expected = np.repeat(plan.rows, rows.held_lengths)  # [tokens of the held rows]
        expected[rows.token_offsets[1:][rows.held_lengths > 0] - 1] = False  # the last of a row predicts nothing
        for group in (parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()):
            dist.all_reduce(self._counts, group=group)  # of all ranks that work on the same samples
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
