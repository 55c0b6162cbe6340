"""Supervised learning of a policy: the cross-entropy of tokens that somebody else chose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from turnrl.policy.model import LanguageModel
from turnrl.types import TokenRow


class Supervised(L.LightningModule):
    """Teaches a policy rows of tokens, with the mean cross-entropy of the marked tokens. A batch is
    a list of rows, unless a subclass makes rows of something else.

    Args:
        learning_rate: The peak of the learning rate, reached after 100 steps or 0.3 of all steps,
            whichever comes first; then it falls to a tenth along a half cosine.
        policy: The policy, whose weights are loaded by the time the fit begins.
    """

    budget: int | None = None
    """The most tokens computed at once, but at least one row; None for the policy's own limit."""

    def __init__(self, learning_rate: float, policy: LanguageModel) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.policy = policy
        self.losses: list[float] = []
        """The loss of each step so far."""

    def rows(self, batch: Sequence[Any]) -> Sequence[TokenRow]:
        """The rows of a batch: token ids, with flags for those that are learned."""
        return batch

    def transfer_batch_to_device(
        self, batch: object, device: torch.device, dataloader_idx: int
    ) -> object:
        """Return the batch: it holds no tensors."""
        return batch

    def training_step(self, batch: Sequence[object], batch_idx: int) -> Tensor:
        """Mean cross-entropy of the batch's tokens. The gradients of all forward passes but the
        last are added up here."""
        for parameter in self.policy.parameters():
            parameter.grad = None
        rows = self.rows(batch)
        total = sum(sum(asked) for _, asked in rows)
        layouts = [layout for _, layout in self.policy.forward_passes(rows, self.budget)]
        loss, summed = torch.zeros(()), 0.0
        for number, layout in enumerate(layouts, 1):
            logprobs = self.policy(move_data_to_device(layout, self.device)).logprobs
            loss = -logprobs.mean() if len(layouts) == 1 else -logprobs.sum() / total
            summed += float(loss.detach())
            if number < len(layouts):
                loss.backward()
        self.losses.append(summed)
        self.log("train/loss", summed, prog_bar=True, batch_size=len(batch))
        return loss

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Nothing: `training_step` already begins with it, and Lightning calls this afterwards."""

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with its schedule."""
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=self.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.learning_rate,
            total_steps=steps,
            pct_start=min(0.3, 100 / steps),
            cycle_momentum=False,
            final_div_factor=0.4,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
