"""`python -m tests.gpu --out DIR`: measure on one GPU what the goals ask for, into DIR/gpu-DATE.json and .md.

Called again with the same DIR on the same machine it goes on with what is not measured yet; --only splits the work into
calls. --rehearse runs the same scripts at tiny sizes on a CPU, into gpu-DATE-rehearsal.*, which measures nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import EvenKeelError
from rollout_sglang.server.start import has_cuda
from tests.gpu.harness import Session
from tests.gpu.machine import describe_machine, describe_sources, describe_versions
from tests.gpu.results import Results, load_or_begin

ORDER = (
    *("stack", "te_linear", "te_layer", "logprob", "quantize"),
    *("training", "engine", "parity", "publish", "loop"),
)
"""What proves that the parts load comes first, and cheap checks before dear ones."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when something that was tried now failed."""
    options = _parse(arguments)
    if not options.rehearse and not has_cuda():
        print("error: no CUDA device; run this where a GPU is, or --rehearse the scripts on a CPU", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    date = time.strftime("%Y-%m-%d")
    path = options.out / f"gpu-{date}{'-rehearsal' * options.rehearse}.json"
    fresh = Results(
        date=date,
        rehearsal=options.rehearse,
        machine=describe_machine(),
        versions=describe_versions(),
    )
    with tempfile.TemporaryDirectory(prefix="evenkeel-gpu-", ignore_cleanup_errors=True) as scratch:
        try:
            results = load_or_begin(path, fresh)
        except EvenKeelError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        session = Session(
            results=results,
            path=path,
            scratch=options.scratch or Path(scratch),
            commit=describe_sources(),
            ends=time.monotonic() + options.deadline_s,
        )
        session.measure([f"tests.gpu.checks.{name}" for name in ORDER], options.only or ORDER)
    print(f"wrote {path} and {path.with_suffix('.md')}")
    return int(any(results.failed(name) for name in options.only or ORDER))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ORDER, metavar="NAME", help=f"of {', '.join(ORDER)}")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--deadline-s", type=float, default=1200.0, help="of this call (default 1200)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON, the table and the log")
    parser.add_argument("--scratch", type=Path, help="models and runs of the checks (default: a temporary folder)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
