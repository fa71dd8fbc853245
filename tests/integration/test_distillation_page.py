"""docs/distillation.md: the commands of the page, one after the other in an empty folder, with fewer, smaller steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.event_log import read_metrics
from tests.support.page_shell import run_page
from tests.support.pages import ROOT, blocks

PAGE = ROOT / "docs" / "distillation.md"
SMALLER = {
    "--steps 350 --batch-size 128": "--steps 2 --batch-size 8 --warmup-steps 1",
    "--steps 60 --batch-size 128 --warmup-steps 10": "--steps 2 --batch-size 8 --warmup-steps 1",
    "evenkeel train distill": "evenkeel train distill --set run.steps=2 --set rollout.prompts_per_batch=2 "
    "--set evaluation.prompts=2 --set evaluation.samples=1",
}
"""What the page says → what is run here; nothing else of it changes."""

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_commands_of_the_page_distill(tmp_path: Path) -> None:
    folder, programs = tmp_path / "own", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    [commands] = blocks(PAGE, "sh")
    for said, smaller in SMALLER.items():
        assert commands.count(said) == 1, f"the page does not say {said!r} once any more"
        commands = commands.replace(said, smaller)
    run_page(commands, folder, programs, deadline_s=560)
    metrics = read_metrics(folder / "runs" / "distill")
    assert [line["step"] for line in metrics] == [0, 1]
    assert all(line["reverse_kl"] != 0.0 and line["teacher_failures"] == 0.0 for line in metrics)
