"""MT-GRPO as a LightningModule: the objective, and nothing that Lightning or another module does
better.

    one iteration = one epoch of `ExperienceLoader`
      collect     the policy acts on each question `group_size` times   (rollout.py, engines/)
                  rewards score the turns and the outcome                (plugins)
                  the estimator turns scores into advantages per turn    (credit.py)
      learn       the clipped surrogate on per-token advantages          (objective.py)

Source: Zeng et al., arXiv 2505.11821. `OutcomeOnly` or `Merged` as the estimator gives the paper's
baselines GRPO-OR and GRPO-MR.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from turnrl.callbacks import Export, InitialValidation, Transcripts
from turnrl.credit import TurnLevel
from turnrl.engines.transformers import TransformersEngine
from turnrl.errors import CheckpointError, RecipeError, TrainingError
from turnrl.experience import (
    Experience,
    Minibatch,
    credit,
    mean_metrics,
    outcome_metrics,
    rollout_metrics,
    score,
)
from turnrl.objective import ClippedSurrogate
from turnrl.policy import Policy
from turnrl.rollout import ChatFormat, Rollout, stream_seed
from turnrl.types import AdvantageEstimator, Group, Question, Reward, Trajectory

_TRAIN, _EVALUATE = 0, 1
"""First number of every random stream, so that collecting and evaluating never share one."""


class MTGRPO(L.LightningModule):
    """Multi-turn GRPO: trains a policy from its own rollouts, with credit given turn by turn.

    Args:
        policy: The model to train.
        rollout: How the agent acts: turn scheme, tools and limits.
        rewards: Turn rewards and outcome rewards; each kind is summed.
        estimator: From rewards to advantages: `TurnLevel` (MT-GRPO), `OutcomeOnly`, `Merged`.
        objective: The clipped surrogate and its options.
        group_size: G, trajectories per question.
        minibatch_size: Trajectories per training step; an iteration's are divided into minibatches
            of this size.
        updates_per_iteration: How often an iteration's trajectories are learned from.
        learning_rate: Of AdamW, after the warm-up.
        warmup_steps: Optimiser steps over which the learning rate rises linearly; it is constant
            afterwards.
        betas: AdamW's decay rates.
        weight_decay: AdamW's weight decay.
        transcripts_per_iteration: How many trajectories of each iteration are written out to be
            read.
        seed: Of sampling and of the order of minibatches.
    """

    def __init__(
        self,
        policy: Policy,
        rollout: Rollout,
        rewards: list[Reward],
        estimator: AdvantageEstimator | None = None,
        objective: ClippedSurrogate | None = None,
        group_size: int = 16,
        minibatch_size: int = 64,
        updates_per_iteration: int = 1,
        learning_rate: float = 1e-6,
        warmup_steps: int = 0,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        transcripts_per_iteration: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.rollout = rollout
        self.rewards = rewards
        self.estimator = estimator if estimator is not None else TurnLevel()
        self.objective = objective if objective is not None else ClippedSurrogate()
        self.group_size = group_size
        self.minibatch_size = minibatch_size
        self.updates_per_iteration = updates_per_iteration
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.betas = betas
        self.weight_decay = weight_decay
        self.transcripts_per_iteration = transcripts_per_iteration
        self.seed = seed
        # checkpoints hold what is trained; `on_load_checkpoint` is strict instead
        self.strict_loading = False
        self.experience: Experience | None = None
        self._chat: ChatFormat | None = None
        self._check_arguments()

    def _check_arguments(self) -> None:
        name = type(self.estimator).__name__
        if self.group_size < self.estimator.min_group_size:
            raise RecipeError(
                f"group_size is {self.group_size}, but {name} compares the trajectories of a "
                f"group and needs at least {self.estimator.min_group_size}. Raise group_size (16 "
                f"is usual), or give {name} baseline: leave_one_out and scale: none."
            )
        for argument in ("group_size", "minibatch_size", "updates_per_iteration"):
            if getattr(self, argument) < 1:
                raise RecipeError(f"{argument} is {getattr(self, argument)}; it must be at least 1")
        for argument in ("learning_rate", "warmup_steps", "weight_decay", "seed"):
            if not getattr(self, argument) >= 0:
                raise RecipeError(f"{argument} is {getattr(self, argument)}; it must be 0 or more")
        if not self.rewards:
            raise RecipeError(
                "rewards is empty, so there is nothing to learn from. Add one, such as ExactMatch."
            )
        if self.objective.kl_coef > 0 and self.policy.lora is None:
            raise RecipeError(
                f"objective.kl_coef is {self.objective.kl_coef}, which compares with the policy "
                "without its adapter, but policy.lora is not set. Set it, or set kl_coef to 0."
            )

    # ---------------------------------------------------------------- set-up

    def configure_callbacks(self) -> list[L.Callback]:
        """What belongs to every run of this module."""
        return [InitialValidation(), Transcripts(self.transcripts_per_iteration), Export()]

    def setup(self, stage: str) -> None:
        """Find a recipe's mistakes before any weights are loaded."""
        if self.trainer.precision != "32-true":
            raise RecipeError(
                f"trainer.precision is {self.trainer.precision!r}, but what is trained is kept in "
                "32-true. Leave it out, and set policy.dtype, which is that of the base's "
                "weights and activations."
            )
        self.rollout.check(self.chat)

    def configure_model(self) -> None:
        """Load the weights onto the device that the strategy chose."""
        self.policy.load(self.trainer.strategy.root_device)

    def configure_optimizers(self) -> Any:
        """AdamW on what is trained, with a linear warm-up per optimiser step."""
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=self.learning_rate, betas=self.betas, weight_decay=self.weight_decay
        )
        warmup = self.warmup_steps

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / (warmup + 1))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    @property
    def chat(self) -> ChatFormat:
        """The policy's chat format."""
        if self._chat is None:
            self._chat = ChatFormat(self.policy.tokenizer)
        return self._chat

    def stream(self, iteration: int) -> int:
        """The random stream of an iteration on this rank."""
        return stream_seed(_TRAIN, self.seed, iteration, self.global_rank) % 2**63

    # --------------------------------------------------------------- collect

    def act(
        self, questions: Sequence[Question], iteration: int, greedy: bool = False
    ) -> list[list[Trajectory]]:
        """Trajectories of the policy as it is now: `group_size` sampled ones per question, or one
        greedy one.
        """
        engine = TransformersEngine(self.policy, self.rollout.slots)
        seed = (_EVALUATE if greedy else _TRAIN, self.seed, iteration, self.global_rank)
        size = 1 if greedy else self.group_size
        shown = self.trainer.is_global_zero and self.trainer.progress_bar_callback is not None
        description = ("evaluating" if greedy else "collecting") if shown else None
        return self.rollout.collect(engine, self.chat, questions, size, seed, greedy, description)

    def collect(self, questions: Sequence[Question], iteration: int) -> Experience:
        """One iteration's experience on this rank: act, score, give credit."""
        start = time.perf_counter()
        groups = tuple(
            Group(question, tuple(members), tuple(score(t, self.rewards) for t in members))
            for question, members in zip(questions, self.act(questions, iteration), strict=True)
        )
        turns = self.rollout.segmenter.max_turns
        advantages = tuple(credit(group, self.estimator, turns) for group in groups)
        metrics = rollout_metrics(groups, advantages, time.perf_counter() - start)
        self.experience = Experience(groups, advantages, metrics)
        return self.experience

    # ----------------------------------------------------------------- learn

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        """The clipped surrogate of one minibatch."""
        mask = batch.loss_mask
        arguments = (batch.input_ids, batch.attention_mask, mask, self.rollout.temperature)
        logprobs, entropy = self.policy.logprobs(*arguments)
        sampled = batch.old_logprobs[mask]
        # before the first step the weights are those that sampled: the ratio is 1, not 1 + rounding
        old = logprobs.detach() if batch.fresh else sampled
        reference = None
        if self.objective.kl_coef > 0:
            with self.policy.reference(), torch.no_grad():
                reference = self.policy.logprobs(*arguments)[0]
        result = self.objective(
            logprobs, old, batch.advantages[mask], batch.weights[mask], reference
        )
        if not result.loss.isfinite():
            raise TrainingError(
                f"the loss is {float(result.loss.detach())} at step {self.global_step} (iteration "
                f"{self.current_epoch}). Lower learning_rate ({self.learning_rate:g}) or "
                "trainer.gradient_clip_val, and resume from the last checkpoint."
            )
        watched = {
            "loss": result.loss.detach(),
            "ratio": result.ratio,
            "clip_fraction": result.clip_fraction,
            "entropy": entropy.mean(),
        }
        if result.kl is not None:
            watched["kl"] = result.kl
        if batch.fresh:
            watched["logprob_gap"] = (logprobs.detach() - sampled).abs().mean()
        for name, value in watched.items():
            self._log(f"train/{name}", value)
        for name, metric in batch.metrics.items():
            self._log(name, metric, shown=name in ("train/exact_match", "train/tool_execution"))
        return result.loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Stop before a step that would ruin the weights."""
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not norm.isfinite():
            raise TrainingError(
                f"the gradient's norm is {float(norm)} at step {self.global_step} (iteration "
                f"{self.current_epoch}). Lower learning_rate ({self.learning_rate:g}), and resume "
                "from the last checkpoint."
            )
        self._log("train/grad_norm", norm)

    def _log(self, name: str, value: Tensor | float, shown: bool = False) -> None:
        # one figure per iteration: the mean over its steps, and over ranks
        self.log(
            name, value, on_step=False, on_epoch=True, batch_size=1, sync_dist=True, prog_bar=shown
        )

    # -------------------------------------------------------------- evaluate

    def validation_step(self, batch: list[Question], batch_idx: int) -> None:
        """Score greedy trajectories, one per question."""
        trajectories = [members[0] for members in self.act(batch, batch_idx, greedy=True)]
        split = getattr(getattr(self.trainer, "datamodule", None), "split", "val")
        rows = [outcome_metrics(t) for t in trajectories]
        if self.trainer.state.fn != "fit":
            count = float(len(batch))
            self.log(f"{split}/questions", count, reduce_fx="sum", sync_dist=True, batch_size=1)
        for name, value in mean_metrics(rows).items():
            self.log(
                f"{split}/{name}",
                value,
                batch_size=len(batch),
                sync_dist=True,
                prog_bar=name == "exact_match",
            )

    # ----------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep only what is trained, and whose it is."""
        state = self.policy.trainable_state()
        checkpoint["state_dict"] = {f"policy.{name}": value for name, value in state.items()}
        checkpoint["policy_identity"] = self.policy.identity

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another policy.

        Raises:
            CheckpointError: Naming what differs.
        """
        if "policy_identity" not in checkpoint:
            raise CheckpointError(
                "this checkpoint was not written by MTGRPO: it names no policy. Give one from a "
                "run of 'turnrl fit'."
            )
        names = {name.removeprefix("policy.") for name in checkpoint["state_dict"]}
        self.policy.check_identity(checkpoint["policy_identity"], names)

    def export(self, folder: str | Path) -> Path:
        """Write the trained adapter, or the whole model if there is none; see `Policy.export`."""
        return self.policy.export(folder)
