"""Deliberate breakages of the product, each of which some test must catch: `python -m tests.mutations [NUMBER …]`.

    the files of this checkout ──copy──▶ a temporary folder ──one breakage──▶ its tests fail: caught
                                                            └─(none)────────▶ its tests pass, or nothing is shown

Run by hand after changes to the suite (`make mutations`); it takes some minutes. It refuses a breakage whose old text
is not found exactly once: the product has moved on, and the list must follow.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[1]
UNIT = "tests/unit"
DEADLINE_S = 900.0
TESTS_FAILED = 1
"""Exit code of pytest. Others say that it could not run the tests, which catches nothing."""
TOOK_TOO_LONG = 124
Verdict = Literal["caught", "SURVIVED", "NOT RUN"]


@dataclass(frozen=True)
class Mutation:
    """`old` in `file` becomes `new`; `tests`, files or folders of tests, must then fail."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "ESS forgets how uneven the ratios are",
        "precision/ratios.py",
        "value = sum_ratio**2 / (num_tokens * (sum_squared_ratio + ESS_EPSILON))",
        "value = sum_ratio**2 / (num_tokens * (num_tokens + ESS_EPSILON))",
        (f"{UNIT}/precision/test_ratios.py",),
    ),
    Mutation(
        "ratios that overflow float32 are let through",
        "precision/ratios.py",
        "log_ratios.isfinite() & (log_ratios <= MAX_LOG_RATIO)",
        "log_ratios.isfinite()",
        (f"{UNIT}/precision/test_ratios.py",),
    ),
    Mutation(
        "quantiles of log-ratios are not interpolated",
        "precision/mismatch/statistics.py",
        "below + (above - below) * (places - places.floor())",
        "below",
        (f"{UNIT}/precision/mismatch/test_statistics.py",),
    ),
    Mutation(
        "a rank counts its own values alone where several look for a quantile",
        "precision/mismatch/statistics.py",
        "found = ranks.sum(not_above) > wanted",
        "found = not_above > wanted",
        (f"{UNIT}/precision/mismatch/test_statistics.py",),
    ),
    Mutation(
        "a rank keeps the rows of its own sequences alone",
        "precision/mismatch/statistics.py",
        "rows = ranks.sum(sequences).cpu().numpy()",
        "rows = sequences.cpu().numpy()",
        (f"{UNIT}/precision/mismatch/test_statistics.py",),
    ),
    Mutation(
        "a number at an edge counts for the bucket below",
        "precision/mismatch/statistics.py",
        "number[self.seen].double(), edges, right=True",
        "number[self.seen].double(), edges, right=False",
        (f"{UNIT}/precision/mismatch/test_statistics.py",),
    ),
    Mutation(
        "sums of chunks replace one another",
        "precision/mismatch/statistics.py",
        "GroupSums(self.sums + other.sums,",
        "GroupSums(other.sums,",
        (f"{UNIT}/precision/mismatch/test_statistics.py",),
    ),
    Mutation(
        "an alarm takes the bound of full precision for quantized rollouts",
        "precision/mismatch/alarms.py",
        "return self.bound_if_quantized if quantized and self.bound_if_quantized is not None else self.bound",
        "return self.bound",
        (f"{UNIT}/precision/mismatch/test_alarms.py",),
    ),
    Mutation(
        "P3O anchors most where the ESS is high",
        "precision/objectives/p3o.py",
        "kl_term = (1.0 - ess) * kl",
        "kl_term = ess * kl",
        (f"{UNIT}/precision/objectives/test_p3o.py",),
    ),
    Mutation(
        "TIS caps one too late",
        "precision/corrections.py",
        "factor = ratios.clamp(max=self.cap)",
        "factor = ratios.clamp(max=self.cap + 1.0)",
        (f"{UNIT}/precision/corrections",),
    ),
    Mutation(
        "emulated training goes on with the weights of the step before",
        "megatron_bridge/learner.py",
        "        weights_changed(self.emulation)\n        self.step += 1",
        "        self.step += 1",
        (f"{UNIT}/megatron_bridge/step/test_fp8_emulation.py",),
    ),
    Mutation(
        "gradients of rounded activations are lost",
        "megatron_bridge/step/fp8_emulation.py",
        "return (straight_through(hidden, quantized), *inputs[1:])",
        "return (quantized, *inputs[1:])",
        (f"{UNIT}/megatron_bridge/step/test_fp8_emulation.py",),
    ),
    Mutation(
        "a block's scale is that of its largest positive weight",
        "precision/formats/formats.py",
        "scale_inv = scale_of(tiles.abs().amax(dim=(1, 3)))",
        "scale_inv = scale_of(tiles.amax(dim=(1, 3)))",
        (f"{UNIT}/precision/formats/test_formats.py",),
    ),
    Mutation(
        "the digest of a batch file is not compared",
        "pipeline/data/batch_format.py",
        "if attributes_sha256(attributes) != expected:",
        "if expected is None:",
        (f"{UNIT}/pipeline/data/test_store.py",),
    ),
    Mutation(
        "a batch is visible before it is on disk",
        "pipeline/data/files.py",
        "            os.fsync(file.fileno())\n",
        "",
        (f"{UNIT}/pipeline/data/test_store.py",),
    ),
    Mutation(
        "of two that commit a batch the second one wins",
        "pipeline/data/files.py",
        "        os.link(temporary, path)\n",
        "        os.replace(temporary, path)\n",
        (f"{UNIT}/pipeline/data/test_store.py",),
    ),
    Mutation(
        "a superseded collector still commits",
        "pipeline/data/store.py",
        "creating(path, before=self._fence) as file:",
        "creating(path) as file:",
        (f"{UNIT}/pipeline/data/test_store.py",),
    ),
    Mutation(
        "a superseded learner still names its checkpoint",
        "pipeline/trainer/checkpoints.py",
        "        self.fence()\n        if not",
        "        if not",
        (f"{UNIT}/pipeline/trainer/test_checkpoints.py",),
    ),
    Mutation(
        "every rank looks for itself whether a batch is there",
        "pipeline/trainer/batches.py",
        "(answer := self.learner.tell(look)) ==",
        "(answer := look()) ==",
        ("tests/integration/test_rank_views.py",),
    ),
    Mutation(
        "a rank knows of its own response tokens alone",
        "pipeline/trainer/batches.py",
        "return replace(batch, **numbers)",
        "return batch",
        ("tests/integration/test_rank_views.py",),
    ),
    Mutation(
        "a mini-batch is dealt out with the others",
        "pipeline/trainer/batches.py",
        "return [*found, ~np.logical_or.reduce(inside)]",
        "return [np.logical_or.reduce(inside), ~np.logical_or.reduce(inside)]",
        (f"{UNIT}/pipeline/trainer/test_batches.py",),
    ),
    Mutation(
        "a step that is saved was not recorded",
        "pipeline/trainer/loop.py",
        "            tell_when_done(self.learner, self._diagnostics.flush)\n",
        "",
        (f"{UNIT}/pipeline/trainer/test_loop.py",),
    ),
    Mutation(
        "a stage requires its own number, not its first batch",
        "pipeline/schedule.py",
        "return batch // self.updates_per_stage * self.updates_per_stage",
        "return batch // self.updates_per_stage",
        (f"{UNIT}/pipeline/test_schedule.py",),
    ),
    Mutation(
        "a batch is removed before its record is there",
        "pipeline/trainer/retention.py",
        "        self.run.fence()\n        make_folder",
        "        self.run.fence()\n        store.path(index).unlink()\n        make_folder",
        ("tests/chaos/simulation/test_simulation.py",),
    ),
    Mutation(
        "a batch is removed that the oldest checkpoint may train again",
        "pipeline/trainer/retention.py",
        "min(saved[0], saved[-1] - keep)",
        "saved[-1] - keep",
        (f"{UNIT}/pipeline/trainer/test_retention.py",),
    ),
    Mutation(
        "a collector that is started again forgets what was solved",
        "pipeline/rollout/collector.py",
        "there = [one for one in range(index) if one not in lost]",
        "there = list[int]()",
        (f"{UNIT}/pipeline/rollout/test_collector_curriculum.py",),
    ),
    Mutation(
        "the last commit of a stage does not wait for the evaluation of its version",
        "pipeline/rollout/collector.py",
        'self.schedule.kind == "staged" and self.schedule.publishes_after(index):',
        "not self.schedule.publishes_after(index):",
        (f"{UNIT}/pipeline/rollout/test_collector_evaluations.py",),
    ),
    Mutation(
        "an evaluation is answered by a version older than the one at which it was due",
        "pipeline/rollout/collector.py",
        "allowed=lambda answered: answered >= version,",
        "allowed=lambda answered: True,",
        (f"{UNIT}/pipeline/rollout/test_collector_evaluations.py",),
    ),
    Mutation(
        "a batch that is made again leaves none of its groups to the others of its hole",
        "pipeline/rollout/batch_builder.py",
        "self._kept_back = self._further * wanted",
        "self._kept_back = 0",
        (f"{UNIT}/pipeline/rollout/test_collector_holes.py",),
    ),
    Mutation(
        "a batch that is made again loses the groups that it does not need",
        "pipeline/rollout/batch_builder.py",
        "for group in self.allocator.leftover():",
        "for group in ():",
        (f"{UNIT}/pipeline/rollout/test_collector_holes.py",),
    ),
    Mutation(
        "a group that fell behind counts as issued where it is trained",
        "pipeline/rollout/bias.py",
        "self._issued.setdefault(one.turn // builder.wanted, [])",
        "self._issued.setdefault(builder.index, [])",
        (f"{UNIT}/pipeline/rollout/test_bias.py",),
    ),
    Mutation(
        "a problem counts as solved one version too early",
        "pipeline/rollout/batch_builder.py",
        "while self._later and self._later[0][0] < version:",
        "while self._later and self._later[0][0] <= version:",
        (f"{UNIT}/pipeline/rollout/test_batch_builder.py",),
    ),
    Mutation(
        "GRPO does not divide by the group's deviation",
        "pipeline/advantages/methods.py",
        "groups.deviation / (std + GRPO_EPSILON)",
        "groups.deviation",
        (f"{UNIT}/pipeline/advantages/test_methods.py",),
    ),
    Mutation(
        "the audit lets a group occur twice",
        "pipeline/analysis/audit.py",
        "groups[times > 1]",
        "groups[times > 2]",
        (f"{UNIT}/pipeline/analysis/test_audit.py",),
    ),
    Mutation(
        "a verifier that hangs is not killed",
        "pipeline/rewards/worker.py",
        '            self._end()\n            return failure("timeout"',
        '            return failure("timeout"',
        (f"{UNIT}/pipeline/rewards/test_pool.py",),
    ),
    Mutation(
        "a verdict on another sample is taken",
        "pipeline/rewards/messages.py",
        "if fields[0] != key:",
        "if fields[0] is None:",
        (f"{UNIT}/pipeline/rewards/test_calling.py",),
    ),
    Mutation(
        "what a sample left behind goes on",
        "pipeline/rewards/worker.py",
        "if self._channel is not None and self._children.left_any():",
        "if False:",
        (f"{UNIT}/pipeline/rewards/test_escapes.py",),
    ),
    Mutation(
        "a rank sends the version before, while its neighbor does not yet keep the new one",
        "megatron_bridge/weight_sync/snapshot.py",
        "while next(lines) != self._number:",
        "while next(lines) is None:",
        (f"{UNIT}/megatron_bridge/weight_sync/test_snapshot.py",),
    ),
    Mutation(
        "a learner without a batch does not look whether its publish failed",
        "pipeline/trainer/loop.py",
        "if self._moving is not None and not self.batches.is_there(step):",
        "if False:",
        (f"{UNIT}/pipeline/trainer/test_loop.py",),
    ),
    Mutation(
        "a version whose folder is missing is not published again",
        "pipeline/trainer/loop.py",
        "return version < published or (version == published and self.run.policy_directory(version).is_dir())",
        "return version <= published",
        (f"{UNIT}/pipeline/trainer/test_loop.py",),
    ),
    Mutation(
        "a replica is not compared with the version's manifest",
        "rollout_sglang/weights/replica.py",
        'if _sha256(data) != last.manifest[name]["sha256"]:',
        "if False:",
        (f"{UNIT}/rollout_sglang/weights/test_replica.py",),
    ),
    Mutation(
        "a replica overwrites the folder that the engine serves",
        "rollout_sglang/weights/replica.py",
        "spare = self._held.pop(0)",
        "spare = self._held.pop()",
        (f"{UNIT}/rollout_sglang/weights/test_replica.py",),
    ),
    Mutation(
        "a delta is applied to whatever has the version that it was made from",
        "pipeline/data/deltas.py",
        "if link.state != delta.base_state:",
        "if False:",
        (f"{UNIT}/pipeline/data/test_delta_chain.py",),
    ),
    Mutation(
        "long gaps of a delta are cut off",
        "pipeline/data/deltas.py",
        "if bridges.any():",
        "if False:",
        (f"{UNIT}/pipeline/data/test_deltas.py",),
    ),
    Mutation(
        "a version that failed is what the next one is compared with",
        "megatron_bridge/weight_sync/delta.py",
        'base, self._base = (self._base if begun["compares"] else None), None',
        'base = self._base if begun["compares"] else None',
        (f"{UNIT}/megatron_bridge/weight_sync/test_delta.py",),
    ),
    Mutation(
        "the versions that a delta is made from are deleted",
        "megatron_bridge/weight_sync/disk.py",
        "doomed = [version for version in older if version not in kept]",
        "doomed = older[: max(0, len(older) - keep)]",
        (f"{UNIT}/megatron_bridge/weight_sync/test_disk_channel.py",),
    ),
    Mutation(
        "tensor parallel ranks all take the first heads",
        "megatron_bridge/weights.py",
        "for group in range(rank * groups, (rank + 1) * groups):",
        "for group in range(groups):",
        (f"{UNIT}/megatron_bridge/test_weights.py",),
    ),
    Mutation(
        "context parallel ranks take neighboring pieces",
        "megatron_bridge/step/micro_batches.py",
        "held += [pieces[rank], pieces[2 * num_ranks - 1 - rank]]",
        "held += [pieces[2 * rank], pieces[2 * rank + 1]]",
        (f"{UNIT}/megatron_bridge/step/test_micro_batches.py",),
    ),
    Mutation(
        "the first step of the warm-up has no learning rate",
        "megatron_bridge/step/optimizer.py",
        "return section.lr * (step + 1) / section.warmup_steps",
        "return section.lr * step / section.warmup_steps",
        (f"{UNIT}/megatron_bridge/step/test_optimizer.py",),
    ),
    Mutation(
        "boxes of a checkpoint may be missing",
        "megatron_bridge/checkpoint/dcp.py",
        "if held != math.prod(shape):",
        "if held > math.prod(shape):",
        (f"{UNIT}/megatron_bridge/checkpoint/test_dcp_reader.py",),
    ),
    Mutation(
        "tensors of a bucket are not aligned",
        "megatron_bridge/weight_sync/transport.py",
        "if specs and (size + len(source) > bucket_bytes or size % tensor.itemsize):",
        "if specs and size + len(source) > bucket_bytes:",
        (f"{UNIT}/megatron_bridge/weight_sync/test_transport.py",),
    ),
    Mutation(
        "an engine that broke gets the next bucket too",
        "megatron_bridge/weight_sync/transport.py",
        "        self.failures[engine] = why\n        del self._left_s[engine]\n",
        "        self.failures[engine] = why\n",
        (f"{UNIT}/megatron_bridge/weight_sync/test_transports.py",),
    ),
    Mutation(
        "scores of other tokens than those asked for are taken",
        "rollout_sglang/answers.py",
        "if foreign or len(scored) != len(row) or",
        "if len(scored) != len(row) or",
        (f"{UNIT}/rollout_sglang/test_client.py",),
    ),
    Mutation(
        "an engine whose CUDA graphs compute otherwise is admitted",
        "rollout_sglang/weight_verifier.py",
        "    if gap > max_mean_gap_nats:",
        "    if gap > 1e9:",
        (f"{UNIT}/rollout_sglang/test_weight_verifier.py",),
    ),
    Mutation(
        "whoever finds an engine asleep wakes it, while the learner trains",
        "rollout_sglang/fleet.py",
        "            if engine.asleep:",
        "            if False:",
        (f"{UNIT}/rollout_sglang/test_turns.py",),
    ),
    Mutation(
        "a published engine is left without keys and values",
        "rollout_sglang/weights/weight_update.py",
        'receiver.wake("kv_cache", deadline_s=deadline_s)',
        'receiver.wake("weights", deadline_s=deadline_s)',
        (f"{UNIT}/rollout_sglang/test_turns.py",),
    ),
    Mutation(
        "optimizer state comes back from the host as zeros",
        "megatron_bridge/step/parking.py",
        "_bytes(storage).copy_(host, non_blocking=True)",
        "_bytes(storage).zero_()",
        (f"{UNIT}/megatron_bridge/step/test_parking.py",),
    ),
    Mutation(
        "a parameter that an engine does not report counts as right",
        "rollout_sglang/weight_verifier.py",
        "if ours.get(name) != digest]",
        "if ours.get(name, digest) != digest]",
        (f"{UNIT}/rollout_sglang/test_weight_verifier.py",),
    ),
    Mutation(
        "answers of the version before are taken",
        "rollout_sglang/fleet.py",
        "and oldest < oldest_allowed:",
        "and oldest < oldest_allowed - 1:",
        (f"{UNIT}/rollout_sglang/test_fleet.py",),
    ),
    Mutation(
        "the planner forgets the memory of a publish",
        "launch/plan/footprint.py",
        "transient = there + max(training, scoring, publishing)",
        "transient = there + max(training, scoring)",
        (f"{UNIT}/launch/plan",),
    ),
    Mutation(
        "a conversion does not compare what it wrote",
        "launch/convert/folders.py",
        "if not torch.equal(*(one.contiguous().flatten().view(torch.uint8) for one in (original, tensor))):",
        "if original.shape != tensor.shape:",
        (f"{UNIT}/launch/convert",),
    ),
    Mutation(
        "a process may die for ever without progress",
        "launch/run/supervisor.py",
        "self.spent = 1 if progress > self.progress else self.spent + 1",
        "self.spent = 1 if progress >= self.progress else self.spent + 1",
        (f"{UNIT}/launch/run/test_supervisor.py::test_deaths_without_progress_end_the_run",),
    ),
    Mutation(
        "probabilities over the whole vocabulary are stored beside kept sets",
        "rollout_sglang/answers.py",
        "logprobs = meta.output_token_sampling_logprobs or []",
        "logprobs = [row[0] for row in meta.output_token_logprobs or []]",
        (f"{UNIT}/rollout_sglang/test_client.py",),
    ),
    Mutation(
        "a log-probability above 0 enters the ledger",
        "pipeline/data/batch_values.py",
        "& (logprobs >= LOWEST_LOGPROB) & (logprobs <= HIGHEST_LOGPROB)",
        "& (logprobs >= LOWEST_LOGPROB)",
        (f"{UNIT}/pipeline/data/test_batch_values.py",),
    ),
    Mutation(
        "a batch is read for training without a look at its values",
        "pipeline/data/store.py",
        "            if check:\n                check_values(batch, self._limits)\n",
        "",
        (f"{UNIT}/pipeline/data/test_batch_values.py",),
    ),
    Mutation(
        "a micro-batch is copied from memory that is not pinned",
        "megatron_bridge/step/micro_batches.py",
        "return tensor.pin_memory().to(device, non_blocking=True)",
        "return tensor.to(device)",
        (f"{UNIT}/megatron_bridge/step/test_host_waits.py",),
    ),
    Mutation(
        "a check of the objective that fails is forgotten",
        "megatron_bridge/step/passes.py",
        'gathered.sums["failed"] += failed',
        'gathered.sums["failed"] += 0 * failed',
        (f"{UNIT}/megatron_bridge/step/test_passes.py",),
    ),
    Mutation(
        "a token is renormalized over the kept set of another",
        "megatron_bridge/step/micro_batches.py",
        "np.arange(*rows.kept_offsets[row : row + 2])",
        "np.arange(*rows.kept_offsets[row : row + 2]) // 2",
        (f"{UNIT}/megatron_bridge/step/test_micro_batches.py",),
    ),
    Mutation(
        "every rank adds all kept tokens, not those of its slice of the vocabulary",
        "megatron_bridge/model/logprobs.py",
        "values = torch.where(is_local(places, vocab), logits",
        "values = torch.where(kept.tokens >= 0, logits",
        (f"{UNIT}/megatron_bridge/model/test_logprobs_kept.py",),
    ),
    Mutation(
        "requests for kept sets go through the router, which drops the question",
        "rollout_sglang/fleet.py",
        "self._pool.entrance is not None and not own",
        "self._pool.entrance is not None",
        (f"{UNIT}/rollout_sglang/test_fleet.py",),
    ),
    Mutation(
        "turns of an episode go to any engine",
        "rollout_sglang/engine_pool.py",
        "engine.index != preferred, burden(engine)",
        "burden(engine)",
        (f"{UNIT}/rollout_sglang/test_affinity.py",),
    ),
    Mutation(
        "the end of a turn that an engine sampled is written again by the template",
        "pipeline/episodes/chat_format.py",
        "tokens += ids[ended:]",
        "tokens += ids",
        (f"{UNIT}/pipeline/episodes/test_chat_format.py",),
    ),
    Mutation(
        "an answer is appended to a row that has grown since it was asked for",
        "pipeline/episodes/rows.py",
        "if number < 0 or len(self._rows[number].tokens) > context.length:",
        "if number < 0:",
        (f"{UNIT}/pipeline/episodes/test_rows.py",),
    ),
    Mutation(
        "the experts of the last token of an answer, which the next request reads first, are lost",
        "pipeline/data/batch.py",
        "len(answer.tokens) - 1 :]",
        "len(answer.tokens) :]",
        (f"{UNIT}/pipeline/data/test_joined_completions.py",),
    ),
)


def check(mutations: Sequence[Mutation]) -> None:
    """Raises ValueError for a breakage whose old text is not found exactly once."""
    for mutation in mutations:
        count = (ROOT / mutation.file).read_text().count(mutation.old)
        if count != 1:
            raise ValueError(
                f"{mutation.what}: {mutation.old!r} stands {count} times in {mutation.file}, expected once"
            )


def copy_tree(target: Path) -> None:
    """The files of this checkout that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@contextmanager
def broken(tree: Path, mutation: Mutation) -> Iterator[None]:
    """While it is open, the copy has the breakage."""
    path = tree / mutation.file
    whole = path.read_text()
    path.write_text(whole.replace(mutation.old, mutation.new))
    try:
        yield
    finally:
        path.write_text(whole)


def status_of_tests(tree: Path, tests: Sequence[str]) -> int:
    """Exit code of pytest in the copy, which stops at the first failure and is ended after a deadline."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    try:
        done = subprocess.run(
            [sys.executable, "-B", "-m", "pytest", *options, *tests],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            timeout=DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        return TOOK_TOO_LONG
    return done.returncode


def judge(tree: Path, mutation: Mutation) -> Verdict:
    """Whether the tests catch the breakage."""
    with broken(tree, mutation):
        status = status_of_tests(tree, mutation.tests)
    if status == 0:
        return "SURVIVED"
    return "caught" if status == TESTS_FAILED else "NOT RUN"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each breakage; 1 when one was not caught or its tests fail without it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help=f"1 to {len(MUTATIONS)}; default: all")
    parser.add_argument("--list", action="store_true", help="print numbers and breakages, and break nothing")
    options = parser.parse_args(arguments)
    if unknown := set(options.numbers) - set(range(1, len(MUTATIONS) + 1)):
        parser.error(f"there is no breakage {min(unknown)}; expected 1 to {len(MUTATIONS)}")
    if options.list:
        print(*(f"{place:3}  {one.file:45}  {one.what}" for place, one in enumerate(MUTATIONS, 1)), sep="\n")
        return 0
    chosen = [MUTATIONS[number - 1] for number in options.numbers] or list(MUTATIONS)
    check(chosen)
    with tempfile.TemporaryDirectory(prefix="evenkeel-mutations-") as scratch:
        tree = Path(scratch)
        copy_tree(tree)
        tests = sorted({test for mutation in chosen for test in mutation.tests})
        if status_of_tests(tree, tests) != 0:
            print("the tests fail without any breakage; run them first:", *tests)
            return 1
        verdicts = []
        for mutation in chosen:
            began = time.monotonic()
            verdicts.append(judge(tree, mutation))
            seconds = time.monotonic() - began
            print(f"{verdicts[-1]:8}  {seconds:4.0f} s  {mutation.file:45}  {mutation.what}", flush=True)
    print(f"{verdicts.count('caught')} of {len(verdicts)} caught")
    return 0 if verdicts.count("caught") == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
