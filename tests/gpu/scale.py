"""What a check is told: how large, on which device, and where it may keep what it has so far."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pipeline.data.files import write_atomically
from tests.gpu.goals import Figure, Figures, NotMeasured

T = TypeVar("T")
NEEDS_TE = "needs Transformer Engine on a GPU"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One part of a check on this machine."""

    rehearsal: bool
    """Tiny sizes on the CPU: proves the script, measures nothing."""
    part: str
    folder: Path
    """Of the check; its parts share it, and with it what one of them leaves for the next."""

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        return "cpu" if self.rehearsal else "cuda"

    def of(self, full: T, tiny: T) -> T:
        """The size that this run takes."""
        return tiny if self.rehearsal else full

    def needs_transformer_engine(self) -> None:
        """Raises NotMeasured."""
        if self.rehearsal or importlib.util.find_spec("transformer_engine") is None:
            raise NotMeasured(NEEDS_TE)

    @property
    def kept_file(self) -> Path:
        return self.folder / f"figures-{self.part}.json"

    def kept(self) -> Figures:
        """What `keep` has written so far."""
        found: Figures = json.loads(self.kept_file.read_text()) if self.kept_file.exists() else {}
        return found

    def keep(self, **figures: Figure) -> Figures:
        """Add figures; they survive whatever happens to the check afterwards. Returns all so far."""
        together = self.kept() | figures
        write_atomically(self.kept_file, json.dumps(together))
        return together
