"""A program that test_ranks.py runs as the product runs its ranks: FOLDER STATUS."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if sys.argv[2] != "0":
        raise ValueError("told to fail")
    print(f"rank {rank} was here", flush=True)
    (Path(sys.argv[1]) / f"rank-{rank}-of-{size}-{os.environ['SAID']}").touch()
    os._exit(0)
