"""Broken versions of store, schedule and resume. Each is wrong only when something fails at a bad moment, or not even
then in a way that a single process could see."""

from __future__ import annotations

from tests.mutations import Mutation

FILES, EPOCHS = "pipeline/data/files.py", "pipeline/data/epochs.py"
LOOP, CHECKPOINTS = "pipeline/trainer/loop.py", "pipeline/trainer/checkpoints.py"
COLLECTOR, ALLOCATOR = "pipeline/rollout/collector.py", "pipeline/rollout/group_allocator.py"
BUILDER, SAMPLER = "pipeline/rollout/batch_builder.py", "pipeline/rollout/group_sampler.py"
SCHEDULE, OLD = "pipeline/schedule.py", "pipeline/trainer/old_logprobs.py"

RECORD = "self.learner.tell(lambda: self._record(step, update, measured | controlled, watch))"
LOOK = "self._look_at_save()"
SAVE = "self._save_if_due(step + 1)"


def _broken(what: str, file: str, old: str, new: str) -> Mutation:
    return Mutation(what, file, old, new, ())


BREAKAGES = (
    # store and files
    _broken("a file gets its name before it is on disk", FILES, "            os.fsync(file.fileno())\n", ""),
    _broken(
        "a committed batch's name is not made durable",
        FILES,
        "        temporary.unlink(missing_ok=True)\n    fsync_directory(path.parent)\n",
        "        temporary.unlink(missing_ok=True)\n",
    ),
    _broken(
        "a replaced file's name is not made durable",
        FILES,
        "    temporary.replace(path)\n    fsync_directory(path.parent)\n",
        "    temporary.replace(path)\n",
    ),
    # Not here: a rename in place of the link. No seed shows it, since a start removes the temporary files of the one
    # before it, and claims of the same number at the same moment are drawn by no plan (see test_epochs.py for those).
    _broken(
        "a moved folder's name is not made durable",
        FILES,
        "        moved = False\n    fsync_directory(target.parent)\n",
        "        moved = False\n",
    ),
    _broken(
        "nobody removes what killed processes left",
        FILES,
        "    for name in names:\n        _remove(",
        "    for name in ():\n        _remove(",
    ),
    # epochs
    _broken(
        "a superseded process goes on",
        EPOCHS,
        "        if later > self.number:\n            raise",
        "        if later < 0:\n            raise",
    ),
    _broken(
        "a start takes the number of the one before",
        EPOCHS,
        "number = newest(folder) + 1",
        "number = max(1, newest(folder))",
    ),
    # schedule
    _broken(
        "every version may be in every batch",
        SCHEDULE,
        "return self.required_version(batch) <= version <= batch",
        "return True",
    ),
    _broken(
        "a stage samples with the version of the stage before",
        SCHEDULE,
        "return batch // self.updates_per_stage * self.updates_per_stage",
        "return max(0, batch // self.updates_per_stage - 1) * self.updates_per_stage",
    ),
    _broken(
        "the lag is one more than agreed",
        SCHEDULE,
        "return max(0, *(last - lag for last,",
        "return max(0, *(last - lag - 1 for last,",
    ),
    _broken(
        "a synchronous batch does not wait for the step before it",
        SCHEDULE,
        "* self.updates_per_stage\n        return batch\n",
        "* self.updates_per_stage\n        return max(0, batch - 1)\n",
    ),
    _broken(
        "the last step of a stage does not publish",
        SCHEDULE,
        "(step + 1) % self.updates_per_stage == 0",
        "step % self.updates_per_stage == 0",
    ),
    # collector
    _broken(
        "batches are committed as they come",
        COLLECTOR,
        "            await asyncio.shield(previous.task)  # batches are committed in order",
        "            pass  # batches are committed in order",
    ),
    _broken(
        "a started collector forgets what was solved",
        COLLECTOR,
        "            for there in sorted(set(range(index)) -",
        "            for there in sorted(set(range(0)) -",
    ),
    _broken(
        "what was evaluated is not kept",
        COLLECTOR,
        "        self.run.write_evaluation(version, found | dict(responses=responses))\n",
        "",
    ),
    _broken(
        "answers that were aborted, or are stale, are taken",
        SAMPLER,
        "return isinstance(answer, Completion) and answer.finish",
        "return isinstance(answer, Completion) or answer.finish",
    ),
    _broken(
        "groups under way are forgotten",
        ALLOCATOR,
        "tuple(sorted([*self._reclaimed, *under_way]))",
        "tuple(sorted(self._reclaimed))",
    ),
    _broken("open groups are not asked again", ALLOCATOR, "deque(sorted(open_groups))", "deque[int]()"),
    _broken(
        "a group is handed out twice",
        ALLOCATOR,
        "            group = self._reclaimed.popleft()\n        else",
        "            group = self._reclaimed[0]\n        else",
    ),
    _broken(
        "a group that does not fit vanishes",
        BUILDER,
        "        self.dropped.append(DroppedGroup(group=prompt.group, reason=reason, problem=prompt.problem))\n",
        "",
    ),
    # learner
    _broken(
        "a resumed learner leaves out a step",
        LOOP,
        "for step in range(first, self.schedule.steps):",
        "for step in range(first + (first > 1), self.schedule.steps):",
    ),
    _broken(
        "a resumed learner begins its advantages anew",
        LOOP,
        "        self.advantage_computer.estimator.restore(state)\n",
        "",
    ),
    _broken(
        "a step is recorded after its checkpoint",
        LOOP,
        f"        {RECORD}\n        {LOOK}\n        {SAVE}\n",
        f"        {LOOK}\n        {SAVE}\n        {RECORD}\n",
    ),
    _broken(
        "a version whose folder is missing is not published again",
        LOOP,
        "return version < published or (version == published and self.run.policy_directory(version).is_dir())",
        "return version <= published",
    ),
    # Not here: a checkpoint that does not wait for its policy's folder. A resumed learner publishes a version whose
    # folder is missing again, so nothing is lost that a judge of the end could see.
    _broken(
        "versions that are served are published again",
        LOOP,
        "self.batches.stop_requested() or self._is_published(version)",
        "self.batches.stop_requested()",
    ),
    _broken(
        "the oldest checkpoints are kept",
        CHECKPOINTS,
        "committed_steps(self.directory)[: -self.keep]",
        "committed_steps(self.directory)[self.keep :]",
    ),
    _broken(
        "the oldest checkpoint is loaded",
        CHECKPOINTS,
        "        if not committed:\n            return None\n        folder",
        "        if not committed:\n            return None\n        committed = committed[:1]\n        folder",
    ),
    _broken(
        "a checkpoint is named before it is durable",
        CHECKPOINTS,
        "    sync_files([*files, *sorted({folder, *(file.parent for file in files)})])\n",
        "",
    ),
    _broken(
        "a stage is scored anew after a restart",
        OLD,
        "if step not in self._stage and self.learner.tell(lambda: self.run.all_skipped(range(first, step))):",
        "if step not in self._stage:",
    ),
    _broken(
        "log-probabilities of a stage are not kept",
        OLD,
        "self.run.write_old_logprobs(index, self._stage[index].cpu().numpy())",
        "index",
    ),
)
