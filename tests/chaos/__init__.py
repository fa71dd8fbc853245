"""The worst day, on purpose: kills, simulated faults, bit flips, malformed input. `make chaos` runs it, about an hour.

    python -m tests.chaos [PART …] [--cases N] [--only TEXT] [--out runs/chaos]

A part is a package `tests.chaos.PART` with a function `cases() -> Sequence[Case]` (tests.chaos.ledger). The first
`--cases` of them are run, in their order, so a part puts those first that say most. A part may name with `IN_AN_HOUR`
how many of its cases `make chaos` runs; without it, all. Each verdict is a line of OUT/PART.jsonl: killed and started
again, `make chaos` goes on where it was.
"""
