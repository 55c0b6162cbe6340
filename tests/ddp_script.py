"""Trains on two CPU processes and saves what each of them saw; run by test_training.py."""

import sys
from pathlib import Path

import lightning as L
import torch

sys.path.insert(0, str(Path(__file__).parent))

from test_training import data, module


def main(model: str, folder: str) -> None:
    it = module(model, minibatch_size=4)
    asked: list[str] = []
    samples: list[torch.Tensor] = []
    collect = it.collect

    def collecting(questions, iteration):
        asked.extend(q.id for q in questions)
        experience = collect(questions, iteration)
        samples.append(torch.tensor(experience.groups[0].trajectories[0].turns[0].token_ids))
        return experience

    it.collect = collecting
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
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
        "first_sample": samples[0],
    }
    torch.save(seen, Path(folder, f"rank{trainer.global_rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
