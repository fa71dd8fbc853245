"""What a check is: goals, figures, and a part that runs in a process of its own: `python -m tests.gpu.check MODULE …`.

A check is a module of tests/gpu/checks with NAME, PARTS (each in its own process, in this order), AFTER (`check` or
`check.part` that it builds on), DEADLINE_S of a part, GOALS, `run(scale)`, which measures one part, and perhaps
`derive(figures)`: figures that follow from those of several parts. It must import without torch.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pipeline.child_process import die_with_parent
from pipeline.data.files import write_atomically

T = TypeVar("T")
Figure = float | list[object] | str
"""A number; a curve or a table; or text: a fact, or why a figure was not measured."""
Figures = dict[str, Figure]
Verdict = Literal["met", "missed", "not measured", "shown"]


class NotMeasured(Exception):  # noqa: N818 (not an error)
    """What a check lacks on this machine, as one line: the rest of it cannot be measured here."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One line of the table. Without a bound the figure is shown without a verdict."""

    figure: str
    """Its name among the check's figures."""
    what: str
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    below: float | None = None

    @property
    def wanted(self) -> str:
        """The bound as text, empty where there is none."""
        bounds = (("≤", self.at_most), ("≥", self.at_least), ("<", self.below))
        return ", ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)

    def judge(self, figures: Mapping[str, Figure]) -> tuple[Verdict, str]:
        """(verdict, why it was not measured); a number that is not finite misses every bound."""
        value = figures.get(self.figure, "the check did not get that far")
        if isinstance(value, str):
            return ("shown", "") if not self.wanted and self.figure in figures else ("not measured", value)
        if not self.wanted or isinstance(value, list):
            return "shown", ""
        missed = (  # written so that NaN misses
            (self.at_most is not None and not value <= self.at_most)
            or (self.at_least is not None and not value >= self.at_least)
            or (self.below is not None and not value < self.below)
        )
        return ("missed" if missed else "met"), ""


def ratios(figures: Mapping[str, Figure], wanted: Mapping[str, tuple[str, str]]) -> Figures:
    """name → first ÷ second, where both are numbers and the second is not 0."""
    found: Figures = {}
    for name, (above, below) in wanted.items():
        numerator, denominator = figures.get(above), figures.get(below)
        if isinstance(numerator, float) and isinstance(denominator, float) and denominator:
            found[name] = numerator / denominator
    return found


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One part of a check on this machine: how large, on which device, and what it has kept so far."""

    rehearsal: bool
    """Tiny sizes on the CPU: proves the script, measures nothing."""
    part: str
    folder: Path
    """Of the check; its parts share it, and with it what one of them leaves for the next."""

    @property
    def runs(self) -> Path:
        """Root of the part's runs; it goes when the part ends."""
        return self.folder / "runs" / self.part

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        return "cpu" if self.rehearsal else "cuda"

    def of(self, full: T, tiny: T) -> T:
        """The size that this run takes."""
        return tiny if self.rehearsal else full

    def needs_transformer_engine(self) -> None:
        """Raises NotMeasured."""
        if self.rehearsal or importlib.util.find_spec("transformer_engine") is None:
            raise NotMeasured("needs Transformer Engine on a GPU")

    def file(self, kind: str) -> Path:
        """`figures` that were kept, or why some are `missing`."""
        return self.folder / f"{kind}-{self.part}.json"

    def read(self, kind: str) -> Figures:
        found: Figures = json.loads(self.file(kind).read_text()) if self.file(kind).exists() else {}
        return found

    def keep(self, **figures: Figure) -> Figures:
        """Add figures; they survive whatever happens to the check afterwards. Returns all so far."""
        together = self.read("figures") | figures
        write_atomically(self.file("figures"), json.dumps(together))
        return together


def main() -> None:
    """Run one part. What it found and what it lacks lies in the files of its scale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module")
    parser.add_argument("part")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    from tests.gpu import check  # this module is `__main__` here; what checks raise is that of its own name

    scale = check.Scale(rehearsal=options.rehearse, part=options.part, folder=options.folder)
    try:
        scale.keep(**importlib.import_module(options.module).run(scale))
    except check.NotMeasured as missing:
        write_atomically(scale.file("missing"), json.dumps(dict(reason=str(missing))))


if __name__ == "__main__":
    die_with_parent()
    main()
