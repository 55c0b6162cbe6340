"""A recipe whose turns are forced, by classes that YAML can name.

Random weights never call a tool and never earn a reward, so without forcing there is nothing to
learn from. Here each trajectory follows a task's script: it calls the tool, reads an article, and
answers. Rewards are a hash of the answer, so they differ within a group.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, final

import lightning as L

from turnrl import installed
from turnrl_bench.ours import AnswerHash, Articles, TaskScript
from turnrl_bench.task import Task

ITERATIONS = 3
KILLED_IN = 1
"""The iteration that is killed, between its two updates."""


@final
class KilledIn(L.Callback):
    """Kills the process, as `kill -9` does, between two updates.

    Args:
        iteration: In which, from 0.
    """

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == self.iteration and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def write_recipe(folder: Path, task: Task, model: Path, on_gpu: bool, kv_memory: str) -> Path:
    """Leave a recipe in a folder, and its questions.

    Args:
        folder: For the recipe and its runs.
        task: What is asked and said.
        model: The folder of the task and its model.
        on_gpu: Whether to train on one.
        kv_memory: Of the engine.
    """
    lines = (
        json.dumps({"id": str(n), "question": text, "answer": ["none"]})
        for n, text in enumerate(task.questions)
    )
    questions = folder / "questions.jsonl"
    questions.write_text("\n".join(lines) + "\n", "utf-8")
    shape = task.shape
    recipe = {
        "seed_everything": 0,
        "model": {
            "policy": {"model": str(model), "lora": {"r": 16, "alpha": 32}},
            "rollout": {
                "segmenter": {
                    "class_path": "ReAct",
                    "init_args": {"max_turns": 2, "answer": "plain", "instructions": task.system},
                },
                "tools": [_named(Articles, folder=str(model))],
                "max_turn_tokens": max(shape.turn_tokens),
                "max_result_tokens": 2 * shape.result_tokens,
                "max_tokens": shape.tokens,
            },
            "rewards": [_named(AnswerHash)],
            "estimator": {"class_path": "OutcomeOnly"},
            "engine": {
                "class_path": "turnrl_bench.Forced",
                "init_args": {
                    "engine": _named(installed("turnrl_engines")["Slots"], kv_memory=kv_memory),
                    "script": _named(TaskScript, folder=str(model)),
                },
            },
            "group_size": shape.group_size,
            "updates_per_iteration": 2,
            # steps that are large enough to be seen: a run that had lost them would show it
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
        },
        "data": {
            "train": str(questions),
            "val": str(questions),
            "fields": {"id": "id", "question": "question", "answers": "answer"},
            "questions_per_iteration": shape.prompts,
        },
        "trainer": {
            "max_epochs": ITERATIONS,
            "check_val_every_n_epoch": ITERATIONS,
            "accelerator": "gpu" if on_gpu else "cpu",
            "devices": 1,
        },
    }
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe, indent=1) + "\n", "utf-8")  # JSON is YAML
    killed = {"trainer": {"callbacks": [_named(KilledIn, iteration=KILLED_IN)]}}
    (folder / "killed.yaml").write_text(json.dumps(killed) + "\n", "utf-8")
    return file


def _named(cls: type, **options: Any) -> dict[str, Any]:
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": options}
