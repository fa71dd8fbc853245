"""What of a run is safe when it ends before its last step, in one sentence for whoever ended it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore


def what_is_saved(run: RunDirectory, steps: int) -> str:
    """`RUN holds 12 batches and the checkpoint of step 10 of 100; the same command goes on from there`."""
    saved, batches = max(run.saved_steps(), default=0), BatchStore(run.batches).next_index
    checkpoint = f"the checkpoint of step {saved} of {steps}" if saved else "no checkpoint yet"
    sampled = f"{batches} batch{'' if batches == 1 else 'es'} and " if batches else ""
    onward = "goes on from there" if saved or batches else "begins again"
    return f"{run.path} holds {sampled}{checkpoint}; the same command {onward}"


@contextmanager
def saved_said(run: RunDirectory, steps: int) -> Iterator[None]:
    """Ctrl-C that ends the block at once says what is saved: the KeyboardInterrupt carries it."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(what_is_saved(run, steps)) from None
