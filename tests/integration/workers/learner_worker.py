"""What torchrun starts. Saving a checkpoint starts a helper that imports this file again: it imports nothing heavy."""

from __future__ import annotations

if __name__ == "__main__":
    from learner_scenarios import main

    main()
