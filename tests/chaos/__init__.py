"""The worst day, on purpose: kills, simulated faults, bit flips, malformed input. `make chaos` runs it, about an hour.

    python -m tests.chaos [PART …] [--minutes M] [--cases N] [--only TEXT] [--out runs/chaos]

A part is a package `tests.chaos.PART` with a function `cases() -> Sequence[Case]` (tests.chaos.ledger). They are run in
their order, so a part puts those first that say most. Each verdict is a line of OUT/PART.jsonl: a second call goes on
where the first one came to its hour, or was killed.
"""
