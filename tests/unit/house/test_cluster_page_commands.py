"""The `evenkeel launch …` commands of docs/cluster.md write their files on a machine that has none of the model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.support.manifests.cases import rendered
from tests.support.manifests.schemas import problems
from tests.support.pages import commands
from tests.support.runs import evenkeel
from tests.unit.house.test_operations_pages import CLUSTER

LAUNCHES = [one for one in commands(CLUSTER) if one.startswith("evenkeel launch ") and "--out" in one]


def test_both_launchers_are_on_the_page() -> None:
    assert {one.split()[2] for one in LAUNCHES} == {"slurm", "kubernetes"}


@pytest.mark.parametrize("command", LAUNCHES)
def test_the_command_writes_its_files(command: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.sh").write_text("module load cuda\n")
    words = shlex.split(command.replace("sha256:…", "sha256:" + "1" * 64))[1:]
    for option in ("--out", "--setup"):
        if option in words:
            words[words.index(option) + 1] = str(tmp_path / Path(words[words.index(option) + 1]).name)
    done = evenkeel(*words)
    assert done.returncode == 0, done.stderr
    assert "--model-config FOLDER" in done.stderr
    assert ("data /shared/math.jsonl is not on this machine" in done.stderr) == ("launch slurm" in command)
    assert list(Path(words[words.index("--out") + 1]).iterdir())


def test_the_pod_of_the_page_is_one_that_kubernetes_takes_and_no_policy_closes() -> None:
    text = CLUSTER.read_text().replace("sha256:…", "sha256:" + "1" * 64)
    written = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    (pod,) = (one for one in written if one.get("kind") == "Pod")
    assert problems(pod) == []
    assert pod["metadata"] == {"name": "shell"}
    claim = rendered()["10-storage.yaml"][0]["metadata"]["name"]
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim
