"""In a folder with `division.json`, trains as it says, on as many CPU processes, and leaves what
was learned. Run by test_division.py."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from runs import adamw, data, make_module, trainer
from turnrl import ClippedSurrogate, OutcomeReward, RecipeError
from turnrl.engines import Completion, Engine, Session
from turnrl.policy.settings import Lora
from turnrl_estimators import TurnCritic

CASES = {
    "bfloat16": {"policy": {"lora": Lora(r=4), "dtype": "bfloat16"}, "steps_per_pass": 1},
    # older log-probabilities are read, and other steps' are kept
    "passes": {"policy": {"lora": Lora(r=4)}, "passes_per_iteration": 2, "steps_per_pass": 3},
    "reference": {
        "policy": {"lora": Lora(r=4), "gradient_checkpointing": True},
        "objective": ClippedSurrogate(kl_coef=0.5),
        "steps_per_pass": 1,
    },
    "critic": {"policy": {"lora": Lora(r=4)}, "estimator": TurnCritic(), "steps_per_pass": 1},
    "whole": {"policy": {}, "steps_per_pass": 1},
    # on float32 weights of what the files have in bfloat16
    "mixed": {
        "policy": {"dtype": "bfloat16", "gradient_checkpointing": True},
        "steps_per_pass": 1,
    },
}


class Writes(Engine):
    """Writes letters that depend on the history and the number of a fork alone, so that every
    process samples the same."""

    copies_weights = True
    version = 0

    def start(self, policy, max_tokens):
        pass

    def sync(self, version):
        self.version = version

    def open(self, prompt_ids):
        return Writing(self, [*prompt_ids])

    async def drain(self):
        pass

    def close(self):
        pass


class Writing(Session):
    def __init__(self, engine, history, number=0):
        self.engine, self.history, self.number, self.forks = engine, history, number, 0

    async def generate(self, new_ids, sampling):
        self.history += new_ids
        draw = random.Random(str((self.history, self.number)))
        ids = tuple(draw.choices(range(40, 100), k=draw.randint(1, sampling.max_tokens)))
        self.history += ids
        return Completion(ids, (-0.5,) * len(ids), "stop", self.engine.version)

    def fork(self):
        self.forks += 1
        return Writing(self.engine, [*self.history], self.forks)

    def close(self):
        pass


class Likely(OutcomeReward):
    """Pays for likely tokens, which it reads of some trajectories alone: of other numbers in each
    process."""

    def prepare(self, trajectories, policy):
        rare = [t for t in trajectories if t.question.id in ("n1", "n4", "n7")]
        for trajectory in rare:
            policy.score_tokens(trajectory.token_rows)
        if policy.is_sharded and Path(policy.settings.model, "adapter_config.json").is_file():
            with pytest.raises(RecipeError, match="the other processes would still give"):
                policy.reference()

    def score(self, trajectory):
        return len(set(trajectory.sample.token_ids)) / 50


def held_bytes(tensors):
    """Bytes that this process has of some tensors."""
    parts = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


class Keep(Callback):
    """Leaves what the first process has: weights, gradients of each step, losses."""

    def __init__(self):
        self.gradients, self.losses, self.norms = [], [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = [p.grad for p in pl_module.policy.parameters() if p.grad is not None]
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
        self.gradients.append(torch.cat([g.flatten() for g in whole]).clone())

    def on_train_epoch_end(self, trainer, pl_module):
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        self.norms.append(float(trainer.callback_metrics["train/grad_norm"]))

    def on_train_end(self, trainer, pl_module):
        state = pl_module.policy.trainable_state()
        moments = [v for s in trainer.optimizers[0].state.values() for v in s.values() if v.ndim]
        weights = [*pl_module.policy.parameters()]
        held = [held_bytes(tensors) for tensors in (weights, moments)]
        if trainer.is_global_zero:
            kept = {"weights": state, "gradients": self.gradients, "losses": self.losses}
            kept |= {"norms": self.norms, "held": held}
            torch.save(kept, Path(trainer.logger.save_dir, "kept.pt"))


def train(case, model, strategy, devices, folder, epochs=2, resume=None):
    settings = CASES[case]
    policy = {"minibatch_tokens": 60, **settings["policy"]}
    options = {**settings, "engine": Writes(), "optimizer": adamw(1e-2)}
    del options["policy"]
    it = make_module(model, policy, **options)
    it.rewards.append(Likely())
    # a validation clears gradients: without one after each iteration, only what learns does
    run = trainer(
        folder, epochs, [Keep()], strategy=strategy, devices=devices, check_val_every_n_epoch=2
    )
    run.fit(it, data(), ckpt_path=resume)


if __name__ == "__main__":
    for arguments in json.loads(Path("division.json").read_text()):
        train(**arguments)
