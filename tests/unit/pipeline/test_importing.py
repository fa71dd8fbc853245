"""What messages tell to install: requirements of ours, never the name that is another project's on PyPI."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
STRANGER = ("pip install evenkeel", 'pip install "evenkeel', "pip install 'evenkeel", "evenkeel[")


def test_nothing_tells_pip_the_name_of_another_project() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = [
        name
        for name in listed.split("\0")
        if name.endswith((".py", ".md", ".sh", ".yaml")) and not name.startswith("tests/") and (ROOT / name).is_file()
        if any(one in (ROOT / name).read_text() for one in STRANGER)
    ]
    assert found == []
