"""TRL's GRPOTrainer on a model and prompts given by path; prints seconds of each step as one JSON line.

Run by loop.py in the benchmark's own environment.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.support.rewards import digit_share


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    prompts = [
        json.loads(line)["prompt"] for line in Path(settings["prompts"]).read_text(encoding="utf-8").splitlines()
    ]
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    ends: list[float] = []

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def training_step(self, *arguments: Any, **named: Any) -> Any:
            result = super().training_step(*arguments, **named)
            ends.append(time.perf_counter())
            return result

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [digit_share("", text, "") for text in completions]

    config = GRPOConfig(
        output_dir=settings["output"],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=settings["batch"],
        num_generations=settings["group"],
        max_completion_length=settings["max_new_tokens"],
        max_steps=settings["steps"],
        learning_rate=1e-6,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = Timed(
        model=settings["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([dict(prompt=prompt) for prompt in prompts]),
        processing_class=tokenizer,
    )
    started = time.perf_counter()
    trainer.train()
    print(json.dumps(dict(start=started, ends=ends)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
