"""A policy folder is gathered by all ranks in one collective, and completed by rank 0 while the others are answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch

from megatron_bridge.hf import folders
from megatron_bridge.hf.folders import export_policy
from pipeline.data.run_directory import unfenced


class Rank:
    """Rank 0. `other` is what another rank failed with."""

    is_rank_zero = True

    def __init__(self, other: Exception | None = None) -> None:
        self.other = other
        self.waited_for: int | None = None
        """The thread in which something is done while the others wait in a collective."""

    def gather(self, action: Callable[[], Any]) -> list[Any]:
        results = [self.tell(action)]
        if self.other is not None:
            raise self.other
        return results

    def tell(self, action: Callable[[], Any]) -> Any:
        self.waited_for = get_ident()
        try:
            return action()
        finally:
            self.waited_for = None


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "model.safetensors").touch()
    return folder


def export(rank: Rank, source: Path, folder: Path) -> None:
    tensors = iter([("model.norm.weight", torch.ones(8))])
    export_policy(tensors, source, folder, rank, fence=unfenced)  # type: ignore[arg-type]


def test_nobody_waits_in_a_collective_while_rank_0_hashes_and_syncs(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, hashed = Rank(), list[bool]()
    list_checksums = folders.list_checksums

    def watched(folder: Path) -> None:
        hashed.append(rank.waited_for == get_ident())
        list_checksums(folder)

    monkeypatch.setattr(folders, "list_checksums", watched)
    export(rank, source, tmp_path / "policy" / "000001")
    assert hashed == [False]
    assert (tmp_path / "policy" / "000001" / "SHA256SUMS").exists()


def test_what_another_rank_failed_over_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 3 failed"):
        export(Rank(RuntimeError("rank 3 failed")), source, tmp_path / "policy" / "000001")
    assert list((tmp_path / "policy").iterdir()) == []
