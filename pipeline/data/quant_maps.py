"""The quant map of a policy folder: `policy/000012/quant_map.yaml`, which formats its weights are for.

An engine that starts on the folder is told these formats. There is none where rollouts are not quantized.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.data.files import write_atomically
from pipeline.errors import StoreError
from precision.formats.quant_map_file import QuantMapFile

QUANT_MAP_FILE = "quant_map.yaml"


def write_quant_map(folder: Path, file: QuantMapFile) -> None:
    """Put the map into a policy folder, atomically."""
    write_atomically(folder / QUANT_MAP_FILE, file.to_yaml())


def read_quant_map(folder: Path) -> QuantMapFile | None:
    """The map of a policy folder; None where it has none. Raises StoreError when it is damaged."""
    path = folder / QUANT_MAP_FILE
    if not path.exists():
        return None
    try:
        return QuantMapFile.read(path)
    except ValueError as error:
        raise StoreError(f"{error}; publish the version again, or start a new run") from error
