"""What the learner adds to Megatron-Core, and what a scoring pass holds beside the logits. Prints ratios.

    step      MegatronLearner.update  ÷  Megatron's own forward-backward and optimizer step on the same packed rows
    plain     MegatronLearner.update  ÷  transformers and torch's fused AdamW on the same rows, padded to the longest
    mismatch  mismatch statistics of a step, and their file  ÷  the scoring pass and the update that it is part of
    memory    largest growth of resident memory during logprobs  ÷  bytes of one micro-batch's logits
    long      largest growth in scoring and update of an episode of 32k tokens beside 31 of 1k  ÷  of 32 even ones

The bare side gets its micro-batches ready-made and computes Megatron's own cross-entropy; the learner plans them, runs
P3O, gathers log-probabilities and entropies, measures ratios and guards the step against numbers that are not finite.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from launch.convert.new_model import new_model
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.step.micro_batches import MicroBatch, Split, TokenRows, plan_micro_batches
from megatron_bridge.step.passes import packed_rows
from pipeline.config.recipe import LearnerSection
from pipeline.data.batch import Batch, Group, LogprobContract, Prompt, Response, Sample, given_batch
from pipeline.data.mismatch_files import write_mismatch
from pipeline.data.run_directory import RunDirectory
from precision.mismatch.statistics import Mismatch
from precision.objectives.p3o import P3O
from tests.bench.figures import forget_peak, resident, seconds, tell
from tests.support.batches import episode

CONTRACT = LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256="")
ROUNDS = 9


def make_batch(vocabulary: int, prompts: int, lengths: tuple[int, int], seed: int = 0) -> Batch:
    """Eight samples a prompt, response lengths drawn evenly from a range."""
    random = np.random.default_rng(seed)
    groups = []
    for _ in range(prompts):
        prompt = random.integers(0, vocabulary, 16).tolist()
        responses = []
        for _ in range(8):
            length = int(random.integers(*lengths))
            tokens = random.integers(0, vocabulary, length).tolist()
            logprobs = random.normal(-np.log(vocabulary), 0.1, length).tolist()
            responses.append(Response(tokens, logprobs, reward=float(random.normal())))
        groups.append((prompt, responses))
    return given_batch(0, groups, CONTRACT)


def build(
    folder: Path,
    characters: int,
    micro_batch_tokens: int = 4096,
    recompute: Literal["none", "full"] = "none",
    **sizes: int,
) -> MegatronLearner:
    """One process, float32; `characters` sets the vocabulary."""
    new_model(folder, characters="".join(chr(0x4E00 + i) for i in range(characters)), **sizes)
    section = LearnerSection(precision="fp32", micro_batch_tokens=micro_batch_tokens, recompute=recompute)
    return MegatronLearner.create(folder, section, P3O(), temperature=1.0, seed=0, total_steps=100)


def step_overhead(learner: MegatronLearner) -> dict[str, float]:
    """Of rounds in which both sides run one after the other, by turns first; in seconds of the processor."""
    batch = make_batch(learner.model_config.vocab_size, prompts=16, lengths=(32, 160))
    advantages = (batch.reward - batch.reward.mean()).astype(np.float32)
    scored = learner.logprobs(batch)
    plan = plan_micro_batches(TokenRows.of_batch(batch), micro_batch_tokens=4096, split=Split())
    bare = partial(bare_step, learner, plan.micro_batches)
    ours: Callable[[], Any] = partial(learner.update, batch, advantages, scored)
    for warm_up in (bare, ours):
        warm_up()
    pairs = []
    for turn in range(ROUNDS):
        taken = {side: processor_seconds(side) for side in ((ours, bare) if turn % 2 else (bare, ours))}
        pairs.append((taken[ours], taken[bare]))
    ratios = [left / right for left, right in pairs]
    return dict(
        ratio=statistics.median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        learner_s=statistics.median(left for left, _ in pairs),
        bare_s=statistics.median(right for _, right in pairs),
        tokens=float(batch.num_response_tokens),
    )


def beside_plain_torch(learner: MegatronLearner) -> dict[str, float]:
    """As `step_overhead`, answers of one length and of many."""
    found = {}
    for kind, lengths in dict(fixed=(32, 33), varying=(1, 256)).items():
        batch = make_batch(learner.model_config.vocab_size, prompts=8, lengths=lengths)
        advantages = (batch.reward - batch.reward.mean()).astype(np.float32)
        ours: Callable[[], Any] = partial(learner.update, batch, advantages, learner.logprobs(batch))
        theirs = plain_step(learner.model_folder, batch, advantages)
        for warm_up in (ours, theirs):
            warm_up()
        pairs = [(processor_seconds(ours), processor_seconds(theirs)) for _ in range(ROUNDS)]
        ratios = [left / right for left, right in pairs]
        found |= {
            f"{kind}_ratio": statistics.median(ratios),
            f"{kind}_spread": max(ratios) - min(ratios),
            f"{kind}_learner_s": statistics.median(left for left, _ in pairs),
            f"{kind}_plain_s": statistics.median(right for _, right in pairs),
        }
    return found


def plain_step(folder: Path, batch: Batch, advantages: NDArray[np.float32]) -> Callable[[], None]:
    """The clipped objective's step as one writes it by hand: a padded grid, log_softmax, clipping, AdamW."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    rows = [torch.from_numpy(batch.sample_tokens(i).astype(np.int64)) for i in range(batch.num_samples)]
    tokens = pad_sequence(rows, batch_first=True)
    real = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for line, prompt, row in zip(mask, batch.prompt_lengths, rows, strict=True):
        line[int(prompt) : len(row)] = True
    mask = mask[:, 1:]
    rollout = torch.zeros(mask.shape).masked_scatter(mask, torch.from_numpy(batch.rollout_logprobs))
    advantage = torch.from_numpy(advantages)[:, None]

    def step() -> None:
        logits = model(input_ids=tokens, attention_mask=None if real.all() else real, use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        ratio = torch.where(mask, logprobs - rollout, 0).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def long_episode() -> dict[str, float]:
    """Each side in a process of its own, since memory that a process has freed may stay with it. Both have as many
    tokens and the same recipe: micro-batches that hold the long row, and full recomputation. `narrow` is even, by a
    recipe that could not take the long row: its micro-batches hold one of the even ones."""
    long, even, found = [32768, *[1024] * 31], [2016] * 32, {}
    for side, lengths, room in (("long", long, max(long)), ("even", even, max(long)), ("narrow", even, max(even))):
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:
            found[side] = alone.submit(growth_of_step, lengths, room).result()
    return dict(ratio=found["long"] / found["even"], **{f"{side}_mib": size / 2**20 for side, size in found.items()})


def growth_of_step(lengths: Sequence[int], micro_batch_tokens: int) -> float:
    """Bytes by which resident memory grows at the most while episodes of these lengths are scored and trained. The
    longest row's logits alone would take 2502 MiB."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as scratch:
        learner = build(
            Path(scratch) / "model",
            20000,
            micro_batch_tokens,
            recompute="full",
            hidden=64,
            layers=2,
            heads=2,
            kv_heads=1,
            head_dim=32,
            ffn=96,
        )
    vocabulary, random = learner.model_config.vocab_size, np.random.default_rng(0)

    def eight_turns(length: int) -> Sample:
        """Three quarters are sampled; before each turn a quarter is given."""
        given = random.integers(0, vocabulary, (8, length // 32)).tolist()
        turns = random.integers(0, vocabulary, (8, length // 8 - length // 32)).tolist()
        logprobs = [[-np.log(vocabulary)] * len(turn) for turn in turns]
        return episode(turns, given[1:], prompt=given[0], logprobs=logprobs, reward=float(random.normal()))

    # Episodes of one group have a prompt of their own each.
    asked = Prompt(group=0, text="", answer="", tokens=(1,))
    group = Group(prompt=asked, samples=tuple(map(eight_turns, lengths)))
    batch = Batch.from_groups(0, [group], contract=CONTRACT, dropped=(), next_group=1, recipe_sha256="")
    before = resident("VmRSS")
    forget_peak()
    learner.update(batch, np.ones(batch.num_samples, np.float32), learner.logprobs(batch))
    return resident("VmHWM") - before


def processor_seconds(action: Callable[[], Any]) -> float:
    """Of this process: on a busy machine steadier than those of the clock."""
    started = time.process_time()
    action()
    return time.process_time() - started


def mismatch_overhead(learner: MegatronLearner) -> dict[str, float]:
    """Median over rounds of what statistics and file take of the step around them; the rest of it is a real step."""
    batch = make_batch(learner.model_config.vocab_size, prompts=16, lengths=(32, 160))
    advantages = (batch.reward - batch.reward.mean()).astype(np.float32)
    spent: list[float] = []

    meter = learner._meter

    def timed(*arguments: Any, step: int) -> Mismatch:
        started = time.perf_counter()
        found = meter(*arguments, step=step)
        found.statistics()  # once more than the step does it: what is within the update cannot be timed apart
        spent.append(time.perf_counter() - started)
        return found

    shares, written = [], []
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as scratch:
        run = RunDirectory(Path(scratch))
        run.make_folders()
        with patch.object(learner, "_meter", timed):
            for number in range(ROUNDS + 1):
                started = time.perf_counter()
                mismatch = learner.update(batch, advantages, learner.logprobs(batch)).mismatch
                step_s = time.perf_counter() - started
                assert mismatch is not None
                written.append(seconds(partial(record, run, number, mismatch)))
                shares.append((spent[-1] + written[-1]) / (step_s + written[-1]))
    return dict(
        ratio=statistics.median(shares[1:]),
        statistics_s=statistics.median(spent[1:]),
        file_s=statistics.median(written[1:]),
        tokens=float(batch.num_response_tokens),
    )


def record(run: RunDirectory, step: int, mismatch: Mismatch) -> None:
    """What the loop does with the statistics of a step."""
    mismatch.by_split()
    write_mismatch(run, step, mismatch)


def bare_step(learner: MegatronLearner, micro_batches: tuple[MicroBatch, ...]) -> None:
    """Megatron-Core alone: cross-entropy of the response tokens, gradients, AdamW."""

    def forward_step(batches: Iterator[MicroBatch], chunk: Any) -> tuple[Any, Callable[..., Any]]:
        rows = next(batches)
        policy = chunk.module
        logits = GPTModel.forward(
            policy, rows.tokens, None, None, packed_seq_params=packed_rows(rows, rows, policy.config)
        )
        losses = GPTModel.compute_language_model_loss(policy, rows.labels, logits.transpose(0, 1).contiguous())
        return losses, lambda output: (
            output[0, rows.columns].sum() / 1000,
            torch.zeros((), dtype=torch.int),
            {},
        )

    for chunk in learner.model:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=learner.model,
        num_microbatches=len(micro_batches),
        seq_length=4096,
        micro_batch_size=1,
        forward_only=False,
    )
    learner.optimizer.step()


def logprob_memory(learner: MegatronLearner) -> dict[str, float]:
    """One micro-batch of which the logits are by far the largest tensor."""
    batch = make_batch(learner.model_config.vocab_size, prompts=2, lengths=(200, 240))
    rows = int((TokenRows.of_batch(batch).lengths - 1).sum())
    assert rows <= 4096
    learner.logprobs(batch)  # buffers that stay
    before = resident("VmRSS")
    forget_peak()
    learner.logprobs(batch)
    logits = rows * learner.model_config.vocab_size * 4
    return dict(ratio=(resident("VmHWM") - before) / logits, logits_mib=logits / 2**20, micro_batch_tokens=float(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("step", "plain", "mismatch", "memory", "long"))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as scratch:
        folder = Path(scratch) / "model"
        what = parser.parse_args().what
        if what == "memory":
            found = logprob_memory(build(folder, 20000, hidden=64, layers=1, heads=2, kv_heads=2, head_dim=32, ffn=96))
        elif what == "long":
            found = long_episode()
        else:
            # Beside plain torch as in tests.bench.loop, where the vocabulary is of digits.
            characters = 40 if what == "plain" else 2000
            learner = build(folder, characters, hidden=256, layers=4, heads=4, kv_heads=2, head_dim=64, ffn=768)
            sides = dict(step=step_overhead, plain=beside_plain_torch, mismatch=mismatch_overhead)
            found = sides[what](learner)
    tell(found)


if __name__ == "__main__":
    main()
