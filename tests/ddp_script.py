"""Trains on two CPU processes and saves what each of them saw; run by test_training.py."""

import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger

sys.path.insert(0, str(Path(__file__).parent))

from test_training import data, module

from turnrl.callbacks import LastCheckpoint


def main(model: str, folder: str) -> None:
    it = module(model, minibatch_size=4)
    asked: list[str] = []
    evaluated: list[str] = []
    collect = it.collect

    def collecting(questions, iteration):
        asked.extend(q.id for q in questions)
        return collect(questions, iteration)

    validate = it.validation_step

    def validating(batch, batch_idx):
        if it.trainer.global_step == 0:
            evaluated.extend(q.id for q in batch)
        return validate(batch, batch_idx)

    it.validation_step = validating

    it.collect = collecting
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        default_root_dir=folder,
        logger=CSVLogger(folder, name="ddp", version=0),
        callbacks=[LastCheckpoint()],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    trainer.fit(it, data())
    seen = {
        "weights": it.policy.trainable_state(),
        "asked": asked,
        "steps": trainer.global_step,
        "stream": it.stream(0),
        "evaluated": evaluated,
    }
    torch.save(seen, Path(folder, f"rank{trainer.global_rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
