"""Training runs in the small world (`worlds.py`), and what they leave."""

from __future__ import annotations

import csv
import dataclasses
import functools
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.loggers import CSVLogger

from turnrl import MTGRPO, Policy, QuestionData, Rollout
from turnrl.engines import Engine, EngineSettings
from turnrl.watch.checkpoints import LastCheckpoint
from worlds import Answered, Called, Echo, Letters

TIMINGS = (
    *("rollout/seconds", "rollout/scoring_seconds", "rollout/tokens_per_s"),
    *("train/seconds", "train/memory_gb"),
)


def adamw(lr, betas=(0.9, 0.99), weight_decay=0.0):
    """What makes an optimiser."""
    return functools.partial(torch.optim.AdamW, lr=lr, betas=betas, weight_decay=weight_decay)


def warmup(steps):
    """What makes a schedule: linear over so many steps, constant afterwards."""
    factor = 1 / (steps + 1)
    return functools.partial(
        torch.optim.lr_scheduler.LinearLR, start_factor=factor, total_iters=steps
    )


@dataclasses.dataclass(frozen=True)
class Ready(EngineSettings):
    """Stands for the settings of an engine that a test has built."""

    engine: Engine

    def build(self):
        return self.engine


def make_module(model, policy=None, rollout=None, **options):
    """4 questions x 4 = 16 trajectories an iteration; two steps to learn from them."""
    if isinstance(engine := options.get("engine"), Engine):
        options["engine"] = Ready(engine)
    settings = {"group_size": 4, "steps_per_pass": 2, "optimizer": adamw(3e-3), **options}
    return MTGRPO(
        Policy(str(model), **(policy or {})),
        Rollout(
            Letters(), [Echo()], **{"max_turn_tokens": 6, "max_tokens": 128, **(rollout or {})}
        ),
        [Answered(), Called()],
        **settings,
    )


def data(**options):
    return QuestionData("worlds.Numbers", "worlds.Numbers", questions_per_iteration=4, **options)


def trainer(folder, epochs=2, callbacks=(), **options):
    L.seed_everything(0, verbose=False)
    settings = {
        "accelerator": "cpu",
        "logger": CSVLogger(str(folder), name="", version=0),
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
    return L.Trainer(max_epochs=epochs, callbacks=[LastCheckpoint(), *callbacks], **settings)


def rows(folder):
    """The rows of a run's metrics, without what the clock says."""
    with Path(folder, "version_0", "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if k not in TIMINGS} for row in csv.DictReader(file)]


def column(folder, name):
    """A metric's values, in order."""
    return [float(row[name]) for row in rows(folder) if row.get(name)]


def last(folder):
    return str(Path(folder, "version_0", "checkpoints", "last.ckpt"))


def weights(policy):
    """Everything that is trained, as one vector."""
    return torch.cat([p.flatten() for p in policy.trainable_state().values()]).clone()


class Printed(ProgressBar):
    """A bar that keeps what is printed."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def print(self, text):
        self.lines.append(text)


class KeepWeights(Callback):
    """Leaves each process' weights at the end of training, the questions that it asked, and how the
    tokens of each step were weighed."""

    def __init__(self):
        self.asked, self.shares = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.shares.append(torch.cat([part.weights for part in batch]))
        if batch_idx == 0:
            self.asked += [group.question.id for group in pl_module.experience.groups]

    def on_train_end(self, trainer, pl_module):
        kept = {
            "weights": weights(pl_module.policy),
            "asked": self.asked,
            "shares": self.shares,
            "steps": trainer.global_step,
            "stream": pl_module.stream(0),
        }
        folder = Path(trainer.logger.save_dir, trainer.logger.name)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(kept, folder / f"rank{trainer.global_rank}.pt")
