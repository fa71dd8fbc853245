"""Even Keel from Python: `import evenkeel`.

    run = evenkeel.train("demo", {"run.name": "mine"})    # or evenkeel.Run("runs/mine"), also while it is trained
    run.metrics["reward_mean"], run.batch(3).reward   # arrays
    pandas.DataFrame(run.metrics)                     # a dict of columns is what data frames are made of

Importing it loads neither torch nor an engine. What is wrong raises an EvenKeelError, whose text is what the command
line would say.
"""

from __future__ import annotations

from evenkeel.runs import Run, list_runs
from evenkeel.training import load_recipe, new_model, sft, train
from pipeline.config.recipe import Recipe
from pipeline.data.batch import Batch
from pipeline.errors import EvenKeelError

__all__ = ["Batch", "EvenKeelError", "Recipe", "Run", "list_runs", "load_recipe", "new_model", "sft", "train"]
