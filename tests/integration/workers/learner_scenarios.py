"""Everything that test_learner.py compares between layouts; see tests.support.ranks."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core.pipeline_parallel import p2p_communication

from megatron_bridge.learner import MegatronLearner
from megatron_bridge.model.logprobs import KeptRows, vocab_parallel_logprobs
from megatron_bridge.parallel.layout import Layout, initialize
from megatron_bridge.step.fp8_emulation import emulated
from megatron_bridge.weight_sync.disk import DiskChannel, ProbeScorer, WeightCheckPlan
from pipeline.config.recipe import LearnerSection, OptimizerSection
from pipeline.data.batch import Batch, KeptSets, LogprobContract, Response, given_batch
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EngineUnavailableError, NonFiniteError
from pipeline.ports.weights import WeightCheck
from precision.formats.quant_map import QuantMap
from precision.objectives.p3o import P3O
from precision.supervised import Supervised
from rollout_sglang.weights.expected_checksums import ExpectedChecksums

CONTRACT = LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256="")
TEMPERATURE = 0.8


def make_batch(seed: int, vocab: int = 256) -> Batch:
    """12 samples of 3 prompts, prompts 3-7 and responses 1-12 tokens long."""
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(3):
        prompt = rng.integers(0, vocab, rng.integers(3, 8)).tolist()
        responses = []
        for _ in range(4):
            length = int(rng.integers(1, 13))
            tokens, logprobs = rng.integers(0, vocab, length).tolist(), rng.normal(-5.5, 0.3, length).tolist()
            responses.append(Response(tokens, logprobs, reward=float(rng.normal())))
        groups.append((prompt, responses))
    return given_batch(seed, groups, CONTRACT)


def advantages(batch: Batch) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (batch.reward - batch.reward.mean()).astype(np.float32)


class Worker:
    def __init__(self, layout: Layout, models: Path, out: Path) -> None:
        self.layout, self.models, self.out = layout, models, out
        self.found: dict[str, Any] = {}

    def learner(self, model: str = "untied", objective: Any = None, **changes: Any) -> MegatronLearner:
        section = LearnerSection(
            tensor_parallel=self.layout.tensor,
            pipeline_parallel=self.layout.pipeline,
            data_parallel=self.layout.data,
            # Adam divides by the gradient's own size: a small eps would blow rounding differences up to whole steps.
            optimizer=OptimizerSection(lr=1e-3, warmup_steps=0, eps=1e-4),
            **{"precision": "fp32", "micro_batch_tokens": 64, "step_deadline_s": 240, **changes},
        )
        return MegatronLearner(
            self.models / model, section, objective or P3O(), temperature=TEMPERATURE, total_steps=10
        )

    def state(self, learner: MegatronLearner) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in learner.named_weights()}

    def steps(self, learner: MegatronLearner, seeds: list[int]) -> list[dict[str, float]]:
        metrics = []
        for seed in seeds:
            batch = make_batch(seed)
            scored = learner.logprobs(batch) if learner._objective.facts.needs_scoring else None
            metrics.append(learner.update(batch, advantages(batch), scored).metrics)
        return metrics

    def scoring(self) -> None:
        rows = [[int(t) for t in make_batch(7).sample_tokens(i)] for i in range(5)]
        for model in ("untied", "tied", "qwen2", "llama"):
            learner = self.learner(model)
            self.found[f"scores_{model}"] = [row.tolist() for row in learner.score_tokens(rows)]
            self.found[f"token_logprobs_{model}"] = learner.logprobs(make_batch(3)).tolist()
            torch.save(self.state(learner), self.out / f"export_{model}_{torch.distributed.get_rank()}.pt")

    def training(self) -> None:
        for model in ("untied", "tied"):
            learner = self.learner(model)
            self.found[f"metrics_{model}"] = self.steps(learner, [1, 2, 3])
            torch.save(self.state(learner), self.out / f"trained_{model}_{torch.distributed.get_rank()}.pt")
        one = self.learner(micro_batch_tokens=4096)
        self.found["metrics_one_micro_batch"] = self.steps(one, [1, 2, 3])
        plain = self.learner(distributed_optimizer=False)
        self.found["metrics_plain_optimizer"] = self.steps(plain, [1, 2, 3])
        micro = self.learner(objective=P3O(ess_scope="micro_batch"), micro_batch_tokens=4096)
        self.found["metrics_micro_batch_ess"] = self.steps(micro, [1])
        half = self.learner(precision="bf16", objective=Supervised())
        self.found["metrics_bf16"] = self.steps(half, [1, 1, 1, 1, 1])

    def guards(self) -> None:
        """Broken numbers must leave every rank with the same error and the weights as they were."""
        errors = []
        for objective in (P3O(), P3O(ess_scope="micro_batch"), Supervised()):
            learner = self.learner(objective=objective, micro_batch_tokens=32)
            before = self.state(learner)
            batch = make_batch(1)
            scored = learner.logprobs(batch)
            broken = advantages(batch)
            if isinstance(objective, Supervised):
                broken[2] = np.nan
            else:
                batch.rollout_logprobs[5] = -np.inf
            try:
                learner.update(batch, broken, scored)
                errors.append("none")
            except NonFiniteError:
                errors.append("NonFiniteError")
            after = self.state(learner)
            assert all(torch.equal(before[name], after[name]) for name in before)
            assert learner.step == 0
        self.found["guards"] = errors

    def checkpoints(self) -> None:
        learner = self.learner()
        self.steps(learner, [1, 2, 3])
        under_way = learner.begin_save(self.out / "checkpoint")
        straight = self.steps(learner, [4, 5])  # meanwhile
        while not under_way.advance(3.0):
            pass
        resumed = self.learner()
        resumed.load(self.out / "checkpoint")
        assert resumed.step == 3
        again = self.steps(resumed, [4, 5])
        left, right = self.state(learner), self.state(resumed)
        self.found["resume_bitwise"] = straight == again and all(torch.equal(left[n], right[n]) for n in left)
        self.found["after_checkpoint"] = straight

    def reshard(self, directory: Path) -> None:
        """Load what another layout saved and go on."""
        learner = self.learner()
        learner.load(directory)
        self.found["after_reshard"] = self.steps(learner, [4, 5])

    def formats(self) -> None:
        learner = self.learner()
        batch, before = make_batch(3), self.state(learner)
        plain = learner.logprobs(batch)
        for name in ("fp8_tensor", "fp8_block"):
            with emulated(learner, QuantMap.for_decoder(learner.model_config.num_layers, name)):
                self.found[f"emulated_{name}"] = learner.logprobs(batch).tolist()
        after = self.state(learner)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert (learner.logprobs(batch) == plain).all()

    def digests(self) -> ExpectedChecksums:
        return ExpectedChecksums(dtype=torch.float32, num_kv_heads=2, tied_embeddings=True)

    def publishing(self) -> None:
        learner = self.learner("tied")

        class Engines:
            async def load(self, version: int, directory: Path, check: WeightCheck) -> dict[str, float]:
                assert (directory / "manifest.json").exists()
                assert WeightCheck.load(directory, check.version) == check
                if version == 2:
                    raise EngineUnavailableError("no engine is left")
                return {"load_s": 0.5}

        run = RunDirectory(self.out)
        plan = WeightCheckPlan(rows=((3, 1, 4, 1, 5), (9, 2, 6)), max_mean_gap_nats=0.1, new_checksums=self.digests)
        probe, engines = ProbeScorer(learner), Engines()
        channel = DiskChannel(learner, engines, run, None, plan, probe, keep=1, deadline_s=60)  # type: ignore[arg-type]
        self.found["publish"] = channel.publish(1)
        try:
            channel.publish(2)
            raise AssertionError("the engines' failure was lost")
        except EngineUnavailableError as error:
            self.found["publish_failure"] = str(error)
        learner.export(self.out / "exported")

    def traffic(self) -> None:
        """What the stages of a pipeline exchange in an update, and how often they wait for the whole device."""
        learner, batch, calls = self.learner(), make_batch(3), Counter[str]()
        scored, shapes = learner.logprobs(batch), set[tuple[int, ...]]()

        def counted(name: str) -> Any:
            send_or_receive = getattr(torch.distributed, name)

            def call(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
                calls[name] += 1
                shapes.add(tuple(tensor.shape))
                return send_or_receive(tensor, *arguments, **named)

            return call

        with ExitStack() as patches:
            for name in ("isend", "irecv"):  # batched transfers look them up in the second module
                wrapped = counted(name)
                for module in (torch.distributed, torch.distributed.distributed_c10d):
                    patches.enter_context(patch.object(module, name, wrapped))
            cuda = p2p_communication.torch.cuda
            patches.enter_context(patch.object(cuda, "synchronize", lambda: calls.update(["waits"])))
            metrics = learner.update(batch, advantages(batch), scored).metrics
        self.found["traffic"] = dict(calls, shapes=sorted(shapes), padding_share=metrics["padding_share"])

    def vocabulary(self) -> None:
        """Vocabulary-parallel log-probabilities against log_softmax in float64, values and gradients."""
        generator = torch.Generator().manual_seed(0)
        whole = (torch.randn(5, 3, 32, generator=generator, dtype=torch.float64) * 4).requires_grad_()
        tokens = torch.randint(0, 32, (5, 3), generator=generator)
        weight = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        reference = torch.log_softmax(whole / TEMPERATURE, -1)
        picked = reference.gather(-1, tokens[..., None])[..., 0]
        (picked * weight).sum().backward()
        size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        mine = whole.detach().chunk(size, -1)[rank].contiguous().requires_grad_()
        group = torch.distributed.group.WORLD
        logprobs, entropy = vocab_parallel_logprobs(mine, tokens, temperature=TEMPERATURE, group=group)
        (logprobs * weight).sum().backward()
        assert whole.grad is not None
        torch.testing.assert_close(logprobs, picked)
        torch.testing.assert_close(entropy, -(reference.exp() * reference).sum(-1))
        torch.testing.assert_close(mine.grad, whole.grad.chunk(size, -1)[rank])
        self.kept_sets(whole.detach(), tokens, weight)

    def kept_sets(self, whole: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor) -> None:
        """The same over kept sets, of which one is within a single rank's slice and one is empty."""
        random = np.random.default_rng(0)
        sets = [sorted({token, *random.integers(0, 32, 9).tolist()}) for token in tokens.reshape(-1).tolist()]
        sets[3], sets[4] = [int(tokens.reshape(-1)[3])], []
        kept = KeptRows.of(KeptSets.of(sets))
        outside = torch.ones(tokens.numel(), 32, dtype=torch.bool)
        outside[kept.owner, kept.tokens] = False
        outside[4] = False
        exact = whole.clone().requires_grad_()
        reference = torch.log_softmax((exact / TEMPERATURE).masked_fill(outside.view_as(exact), -torch.inf), -1)
        some = (kept.counts > 0).view_as(tokens)
        picked = torch.where(some, reference.gather(-1, tokens[..., None])[..., 0], 0)
        (picked * weight).sum().backward()
        size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        mine = whole.chunk(size, -1)[rank].contiguous().requires_grad_()
        logprobs, entropy = vocab_parallel_logprobs(
            mine, tokens, temperature=TEMPERATURE, group=torch.distributed.group.WORLD, kept=kept
        )
        (logprobs * weight).sum().backward()
        assert exact.grad is not None
        plogp = (reference.exp() * reference.clamp(min=-1e300)).sum(-1)
        torch.testing.assert_close(logprobs, picked)
        torch.testing.assert_close(entropy, torch.where(some, -plogp, 0))
        torch.testing.assert_close(mine.grad, exact.grad.chunk(size, -1)[rank])


def measure(layout: Layout, models: Path, out: Path, reshard: Path | None) -> None:
    """One rank: write found_RANK.json and the weights that the test compares into `out`."""
    initialize(layout, seed=0, deadline_s=240)
    worker = Worker(layout, models, out)
    worker.vocabulary()
    worker.scoring()
    worker.training()
    worker.guards()
    worker.checkpoints()
    if reshard is not None:
        worker.reshard(reshard)
    worker.formats()
    worker.traffic()
    worker.publishing()
    (out / f"found_{torch.distributed.get_rank()}.json").write_text(json.dumps(worker.found))
