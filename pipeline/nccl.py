"""Name the release of NCCL of an interpreter: `python -P -m pipeline.nccl` prints the release that its torch loads.

All processes of an NCCL group need the same release, to the last digit: NCCL's initialization (init.cc) compares the
version codes of all ranks and refuses the group otherwise. Needs only the standard library: engines import it too.
"""

from __future__ import annotations

import ctypes
import os

DISTRIBUTIONS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def loaded_release() -> str:
    """Return the release that this process has loaded, such as `2.30.7`; empty before torch is imported, and for a
    torch without NCCL. torch.cuda.nccl.version() would name the release that torch was compiled with."""
    code = ctypes.c_int()
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return ""
    library.ncclGetVersion(ctypes.byref(code))
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"


def mismatch(learner: str, engines: str) -> str:
    """Return why a learner and engines with these releases form no group; empty if they may, or one is unknown."""
    if not learner or not engines or learner == engines:
        return ""
    return (
        f"NCCL {engines} in the engines' torch and {learner} in the learner's: NCCL forms groups of one release alone; "
        f"pip install --no-deps {DISTRIBUTIONS[0]}=={engines} for the learner, or choose weights.channel disk or delta"
    )


if __name__ == "__main__":
    import torch  # noqa: F401 - loads NCCL

    print(loaded_release())
