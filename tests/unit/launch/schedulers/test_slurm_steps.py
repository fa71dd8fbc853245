"""Roles as job steps, with programs on the PATH that answer as Slurm's commands do."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.run.starter import NoRoomError, Unit
from launch.schedulers.slurm import srun as srun_module
from launch.schedulers.slurm.placement import Shape
from launch.schedulers.slurm.srun import NODE_DIED, Allocation, Guard, SlurmError, Srun, SrunStarter, Step
from pipeline.child_process import ChildProcess
from pipeline.errors import STOPPED_EXIT_CODE, SupersededError

TWO_NODES = Shape(
    gpus_per_node=0, learner_nodes=2, learner_gpus=0, engines=1, engine_nodes=1, engine_gpus=0, router=False
)
LEARNER, SECOND = Unit("learner"), Unit("learner", node=1)


class FakeSlurm:
    """Slurm's commands as scripts over files that say what there is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        self.nodes("n1", "n2", "n3")
        self.states(n1="mixed", n2="mixed", n3="idle")
        (folder / "steps").write_text("")
        self.script("squeue", 'cat "$F/steps"')
        self.script("sinfo", 'cat "$F/states"')
        self.script(
            "scontrol",
            'case "$*" in "show hostnames"*) tr , "\\n" <<<"$3" ;; *"show job"*) cat "$F/job" ;; '
            '*) echo "$@" >>"$F/said" ;; esac',
        )
        self.script("scancel", 'echo "scancel $*" >>"$F/said"')
        self.script("sbatch", 'echo "sbatch $*" >>"$F/said"; env >"$F/submitted_with"; echo 43')
        self.script(
            "srun", 'echo "$@" >>"$F/srun"; env >"$F/srun_env"; while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"'
        )

    def script(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\nF={self.folder}\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def nodes(self, *names: str, restarts: int = 0) -> None:
        """Of the job."""
        fields = f"JobId=42 JobName=a Requeue=1 Restarts={restarts} JobState=RUNNING ReqNodeList=(null)"
        (self.folder / "job").write_text(f"{fields} NodeList={','.join(names)} BatchHost=n1 Power= \n")

    def states(self, threads: int = 2, **states: str) -> None:
        """As sinfo prints them, with threads per core and NodeAddr."""
        lines = "".join(f"{node} {state} {threads} 10.0.0.{node[1:]}\n" for node, state in states.items())
        (self.folder / "states").write_text(lines)

    def said(self, name: str = "said") -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    started: list[ChildProcess] = []

    class Noted(Srun):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr("launch.schedulers.slurm.srun.Srun", Noted)
    yield
    for process in started:
        process.kill()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    made = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
    return made


@pytest.fixture
def allocation(fake: FakeSlurm) -> Allocation:
    return Allocation.of({"SLURM_JOB_ID": "42", "SLURMD_NODENAME": "n1", "SLURM_CPUS_ON_NODE": "64"})


def starter(allocation: Allocation, shape: Shape = TWO_NODES, *command: str) -> SrunStarter:
    words = list(command) or ["sleep", "60"]
    environment = {"PATH": os.environ["PATH"], "SLURM_GPUS": "8", "EVENKEEL_TEACHER_API_KEY_FILE": "/theirs"}
    return SrunStarter(allocation, shape, lambda unit, host: words, environment)


def ended(step: Step) -> int:
    give_up = time.monotonic() + 20
    while (status := step.poll()) is None:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    return status


def test_nodes_are_up_if_they_answer_and_are_still_in_the_job(fake: FakeSlurm, allocation: Allocation) -> None:
    assert allocation.up() == ["n1", "n2", "n3"]
    fake.states(n1="draining", n2="mixed*", n3="idle")
    assert allocation.up() == ["n3", "n1"]
    fake.nodes("n1", "n2")  # Slurm has taken n3 out of the job
    fake.states(n1="mixed", n2="down*", n3="idle")
    assert allocation.up() == ["n1"]


def test_a_node_that_calls_itself_127_0_1_1_is_reached_at_an_address(
    fake: FakeSlurm, allocation: Allocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian's installer writes it into /etc/hosts. Roles get addresses: other nodes call themselves so, too."""
    known = dict(n1="127.0.1.1", n2="192.0.2.2")

    def getaddrinfo(host: str, *_: object, **__: object) -> list[Any]:
        if host.startswith("n") and host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known.get(host, host), 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    allocation.up()
    assert [allocation.address(node) for node in ("n1", "n2", "n3")] == ["10.0.0.1", "192.0.2.2", "10.0.0.3"]
    fake.script("sinfo", 'sed "s/10.0.0./n/" "$F/states"')  # NodeAddr is the name, as it is by default
    allocation.up()
    monkeypatch.setattr(
        srun_module, "own_address_towards", {"192.0.2.2": "192.0.2.1", "127.0.1.1": "127.0.0.1"}.__getitem__
    )
    assert [allocation.address(node) for node in ("n1", "n3")] == ["192.0.2.1", "n3"]
    fake.nodes("n1")
    allocation.up()
    monkeypatch.setattr(srun_module, "own_address_towards", lambda other: other)
    assert allocation.address("n1") == "127.0.0.1"


def test_a_controller_that_is_away_changes_nothing(
    fake: FakeSlurm, allocation: Allocation, capsys: pytest.CaptureFixture[str]
) -> None:
    before = allocation.up()
    fake.script("scontrol", "echo Unable to contact slurm controller >&2; exit 1")
    assert allocation.up() == before
    assert "Unable to contact slurm controller; the nodes are taken to be those of before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "told"),
    [("PreemptTime=2026-03-01T12:00:00 ", True), ("PreemptTime=None ", False), ("", False)],
    ids=["in its grace time", "not preempted", "PreemptMode=OFF"],
)
def test_a_job_that_slurm_preempts_is_known(fake: FakeSlurm, allocation: Allocation, field: str, told: bool) -> None:
    fake.nodes("n1", "n2")
    job = fake.folder / "job"
    job.write_text(job.read_text().replace("ReqNodeList", f"{field}ReqNodeList"))
    assert allocation.is_preempted() is told


def test_a_step_is_one_task_on_one_node(fake: FakeSlurm, allocation: Allocation, tmp_path: Path) -> None:
    first, second = starter(allocation, TWO_NODES, "echo", "role"), Unit("learner", node=1)
    step = first.start(second, tmp_path / "log")
    assert (ended(step), step.host, step.name) == (0, "n2", "learner-1.0.1")
    assert (tmp_path / "log").read_text() == "role\n"
    (srun,) = fake.said("srun").splitlines()
    for option in ("--jobid=42", "--job-name=learner-1.0.1", "--nodelist=n2", "--nodes=1", "--ntasks=1", "--overlap"):
        assert option in srun.split()
    assert "--kill-on-bad-exit=0" in srun
    assert "--no-kill=off" in srun
    environment = dict(line.split("=", 1) for line in fake.said("srun_env").splitlines() if "=" in line)
    assert (environment["SLURM_JOB_ID"], environment["SLURM_EXPORT_ENV"]) == ("42", "ALL")
    assert "SLURM_GPUS" not in environment  # srun would ask for all of them for each step
    assert "EVENKEEL_TEACHER_API_KEY_FILE" not in environment  # the collector alone asks the teacher


def test_steps_with_gpus_have_them_for_themselves(allocation: Allocation) -> None:
    shape = Shape(
        gpus_per_node=8, learner_nodes=1, learner_gpus=4, engines=1, engine_nodes=1, engine_gpus=4, router=False
    )
    options = starter(allocation, shape).srun_options(Unit("engine", 0), "n1", "engine-0.1")
    assert {"--exact", "--gpus-per-node=4", "--cpus-per-task=32", "--mem=0"} <= set(options)
    assert {"--overlap", "--gres=none"} <= set(starter(allocation, shape).srun_options(Unit("collector"), "n1", "c"))


@pytest.mark.parametrize(
    ("cpus", "gpus", "threads"),
    [("190", 4, 2), ("222(x4)", 4, 2), ("224,220(x2)", 2, 2), ("220", 1, 2), ("188,190", 2, 4), ("63", 1, 1)],
)
def test_all_engines_of_a_node_have_cores(fake: FakeSlurm, tmp_path: Path, cpus: str, gpus: int, threads: int) -> None:
    """Slurm charges a step whole cores, and of its node no more than the job has there."""
    fake.states(threads, n1="mixed", n2="mixed", n3="idle")
    allocation = Allocation.of({"SLURM_JOB_ID": "42", "SLURMD_NODENAME": "n1", "SLURM_JOB_CPUS_PER_NODE": cpus})
    ours = starter(
        allocation,
        Shape(
            gpus_per_node=8,
            learner_nodes=1,
            learner_gpus=8,
            engines=16 // gpus,
            engine_nodes=1,
            engine_gpus=gpus,
            router=False,
        ),
    )
    for index in range(16 // gpus):
        ours.start(Unit("engine", index), tmp_path / "log")
    give_up = time.monotonic() + 20
    while len(lines := fake.said("srun").splitlines()) < 16 // gpus:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    asked = [int(re.findall(r"--cpus-per-task=(\d+)", line)[0]) for line in lines if "--nodelist=n2" in line]
    charged = sum(math.ceil(count / threads) * threads for count in asked)
    fewest = min(int(count) for count in re.findall(r"\b\d+(?=,|\(|$)", cpus))
    assert len(asked) == 8 // gpus
    assert fewest - len(asked) * threads < charged <= fewest


def test_a_role_stays_where_it_was_until_its_node_dies(fake: FakeSlurm, allocation: Allocation, tmp_path: Path) -> None:
    ours = starter(allocation, TWO_NODES, "false")
    assert [ours.start(SECOND, tmp_path / "log").host for _ in range(2)] == ["n2", "n2"]
    fake.states(n1="mixed", n2="down*", n3="idle")
    moved = ours.start(SECOND, tmp_path / "log")
    assert (moved.host, moved.name) == ("n3", "learner-1.0.3")
    fake.states(n1="mixed", n2="down*", n3="down*")
    with pytest.raises(NoRoomError):
        ours.start(SECOND, tmp_path / "log")


def test_a_role_that_died_on_a_draining_node_moves_to_one_with_room(
    fake: FakeSlurm, allocation: Allocation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others there go on: nothing is known to be wrong with them."""
    shape = Shape(
        gpus_per_node=8, learner_nodes=1, learner_gpus=8, engines=2, engine_nodes=1, engine_gpus=4, router=False
    )
    ours = starter(allocation, shape, "false")
    engines = [Unit("engine", index) for index in range(2)]
    assert [ours.start(unit, tmp_path / "log").host for unit in (LEARNER, *engines)] == ["n1", "n2", "n2"]
    fake.states(n1="draining", n2="mixed", n3="idle")
    assert ours.start(LEARNER, tmp_path / "log").host == "n3"
    assert capsys.readouterr().out == "learner moves from n1 to n3\n"
    fake.states(n1="drained", n2="draining", n3="mixed")
    assert [ours.start(unit, tmp_path / "log").host for unit in (LEARNER, *engines)] == ["n3", "n2", "n2"]


def test_the_end_of_a_node_is_no_success(fake: FakeSlurm, allocation: Allocation, tmp_path: Path) -> None:
    """srun ends with 0 then."""
    ours = starter(allocation, TWO_NODES, "true")
    assert ended(ours.start(SECOND, tmp_path / "log")) == 0
    lost = ours.start(SECOND, tmp_path / "log")
    fake.nodes("n1", "n3")
    assert ended(lost) == NODE_DIED


def test_a_step_is_asked_to_end_by_its_number(fake: FakeSlurm, allocation: Allocation, tmp_path: Path) -> None:
    step = starter(allocation).start(SECOND, tmp_path / "log")
    (fake.folder / "steps").write_text("42.batch batch\n42.3 learner-1.0.1\n42.4 learner-1.0.10\n")
    step.terminate()
    assert fake.said() == "scancel --ctld --signal=TERM 42.3\n"
    assert step.poll() is None
    fake.script("scancel", f'echo "scancel $*" >>"$F/said"; : >{fake.folder}/steps')
    step.kill()
    assert fake.said().splitlines()[-1] == "scancel --ctld --signal=KILL 42.3"
    assert step.poll() == -signal.SIGKILL


def test_a_step_is_asked_to_end_again_where_the_controller_did_not_answer(
    fake: FakeSlurm,
    allocation: Allocation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It saves then; killed, it would not."""
    monkeypatch.setattr("launch.schedulers.slurm.srun.ASK_PAUSE_S", 0.0)
    step = starter(allocation).start(SECOND, tmp_path / "log")
    (fake.folder / "steps").write_text("42.3 learner-1.0.1\n")
    fake.script("squeue", '[ -e "$F/away" ] || cat "$F/steps"; ! rm "$F/away" 2>/dev/null')
    (fake.folder / "away").touch()
    step.terminate()
    assert "learner-1.0.1 is asked to end again" in capsys.readouterr().err
    assert (fake.said(), step.client.poll()) == ("", None)
    for _ in range(2):
        assert step.poll() is None
    assert fake.said() == "scancel --ctld --signal=TERM 42.3\n"


def test_a_step_that_slurm_has_not_made_is_given_up(fake: FakeSlurm, allocation: Allocation, tmp_path: Path) -> None:
    step = starter(allocation).start(SECOND, tmp_path / "log")
    step.terminate()
    assert fake.said() == ""
    assert step.poll() == -signal.SIGKILL  # srun answers SIGTERM by ending the step of that number, whosever it is now


@pytest.mark.parametrize(
    ("ends", "asked"),
    [([LEARNER, SECOND], True), ([SECOND], False), ([LEARNER, Unit("collector")], False)],
    ids=["everywhere", "a node that shuts down", "the other node"],
)
def test_a_signal_to_the_steps_alone_is_the_users(
    allocation: Allocation, tmp_path: Path, ends: list[Unit], asked: bool
) -> None:
    ours = starter(allocation, TWO_NODES, "bash", "-c", f"exit {STOPPED_EXIT_CODE}")
    steps = [ours.start(unit, tmp_path / "log") for unit in ends]
    assert [ended(step) for step in steps] == [STOPPED_EXIT_CODE] * len(steps)
    assert ours.asked_from_outside() is asked


def test_what_we_asked_is_not_the_users(fake: FakeSlurm, allocation: Allocation, tmp_path: Path) -> None:
    ours = starter(allocation, TWO_NODES, "bash", "-c", f"while [ ! -e {tmp_path}/end ]; do sleep .01; done; exit 143")
    steps = [ours.start(unit, tmp_path / "log") for unit in (LEARNER, SECOND)]
    (fake.folder / "steps").write_text("42.0 learner.0.1\n42.1 learner-1.0.1\n")
    for step in steps:
        step.terminate()
    (tmp_path / "end").touch()
    assert [ended(step) for step in steps] == [STOPPED_EXIT_CODE] * 2
    assert not ours.asked_from_outside()


def test_the_guard_requeues_a_job_that_has_lost_its_batch_script(
    fake: FakeSlurm, allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.schedulers.slurm.srun.GUARD_POLL_S", 0.05)
    guard = Guard(allocation, tmp_path / "guard.log")
    guard.keep()
    guard.keep()  # one is enough
    give_up = time.monotonic() + 20
    while "guard.0.1" not in fake.said("srun"):
        assert time.monotonic() < give_up
        time.sleep(0.01)
    assert "--nodelist=n3" in fake.said("srun")
    time.sleep(0.2)
    assert fake.said() == ""
    fake.nodes("n2", "n3")
    while "requeue 42" not in fake.said():
        assert time.monotonic() < give_up
        time.sleep(0.01)
    guard.stop()
    assert fake.said("srun").count("--job-name=guard.") == 1


def test_a_superseded_attempt_starts_nothing_and_requeues_nothing(
    fake: FakeSlurm, allocation: Allocation, tmp_path: Path
) -> None:
    """A job keeps its number when it is requeued, so its nodes are another attempt's when a cable is put back."""
    ours = starter(allocation)
    fake.nodes("n1", "n3", restarts=1)
    for order in (lambda: ours.start(LEARNER, tmp_path / "log"), allocation.requeue):
        with pytest.raises(SupersededError, match=r"job 42 was started again \(restart 1\)"):
            order()
    assert fake.said() == fake.said("srun") == ""


def test_a_superseded_guard_ends(
    fake: FakeSlurm, allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.schedulers.slurm.srun.GUARD_POLL_S", 0.05)
    guard = Guard(allocation, tmp_path / "guard.log")
    guard.keep()
    fake.nodes("n2", "n3", restarts=1)
    give_up = time.monotonic() + 20
    while guard.running:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    assert fake.said() == ""


def test_the_next_job_knows_nothing_of_this_one(
    fake: FakeSlurm, allocation: Allocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "9")
    assert allocation.submit_next(Path("/jobs/job.sbatch")) == "43"
    assert fake.said() == "sbatch --parsable --dependency=afterany:42 /jobs/job.sbatch\n"
    assert "SLURM_NTASKS" not in fake.said("submitted_with")
    fake.script(
        "scontrol",
        'case "$*" in *"show job"*) cat "$F/job" ;; *) echo Requested operation is disabled >&2; exit 1 ;; esac',
    )
    with pytest.raises(SlurmError, match="scontrol requeue 42 ended with 1: Requested operation is disabled"):
        allocation.requeue()
