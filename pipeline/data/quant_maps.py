"""Read and write the quant maps of a run: the formats of the weights in its policy folders.

    policy/000012/quant_map.yaml          the formats of engines that start on the folder; absent where rollouts are not
                                          quantized
    policy/000012/maps/0a1b2c3d4e5f/      the same version for engines started with an older map, named by its digest;
                                          only while there are such engines
    quant_maps/000001.yaml                a map that the ESS controller decided on, by number

An engine keeps the map that it was started with, and announces its digest (pipeline.data.membership).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.data.checksums import read_sealed, write_sealed
from pipeline.data.files import make_folder
from pipeline.data.run_directory import numbered_files
from pipeline.errors import StoreError
from precision.formats.quant_map import QuantMapFile

QUANT_MAP_FILE = "quant_map.yaml"
_REMEDY = "remove it and start the learner again, which writes it from its control records"


def write_quant_map(folder: Path, file: QuantMapFile) -> None:
    """Write the map into a policy folder, atomically."""
    write_sealed(folder / QUANT_MAP_FILE, file.to_yaml())


def read_quant_map(folder: Path) -> QuantMapFile | None:
    """Read the map of a policy folder; None without one. Raises StoreError for damage."""
    path = folder / QUANT_MAP_FILE
    if not path.exists():
        return None
    return _read(path, "stop the run and repair it: `evenkeel repair`")


def digest_of(file: QuantMapFile | None) -> str:
    """Return the digest that names a map: 12 hexadecimal digits; empty for none."""
    return "" if file is None else hashlib.sha256(file.to_yaml().encode()).hexdigest()[:12]


def older_folder(folder: Path, quant_map: str) -> Path:
    """Return where a publish puts the weights for engines that still have an older map, named by its digest."""
    return folder / "maps" / (quant_map or "none")


@dataclass(frozen=True)
class NumberedMaps:
    """The maps that the controller decided on, RUN/quant_maps/000001.yaml; 0 is the recipe's. Each follows from the
    record of its decision, so a repeated write changes nothing."""

    folder: Path
    fence: Callable[[], None]

    def write(self, number: int, file: QuantMapFile) -> None:
        """Write map `number`, durably, unless it exists."""
        path = self.folder / f"{number:06d}.yaml"
        if not path.exists():
            self.fence()
            make_folder(self.folder)
            write_sealed(path, file.to_yaml())

    def read(self, number: int) -> QuantMapFile:
        """Read map `number`. Raises StoreError when it is missing or damaged."""
        return _read(self.folder / f"{number:06d}.yaml", _REMEDY)

    def with_digest(self, quant_map: str) -> QuantMapFile | None:
        """Return the map with the digest that engines announce, or None. Raises StoreError."""
        files = (_read(path, _REMEDY) for path in numbered_files(self.folder, ".yaml").values())
        return next((file for file in files if digest_of(file) == quant_map), None)


def _read(path: Path, remedy: str) -> QuantMapFile:
    try:
        return QuantMapFile.read(path, read_sealed(path, remedy))
    except OSError as error:
        raise StoreError(f"cannot read {path} ({error.strerror}); {remedy}") from error
    except ValueError as error:
        raise StoreError(f"{error}; {remedy}") from error
