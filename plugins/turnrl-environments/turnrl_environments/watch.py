"""The warning that environments end no attempt."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import lightning as L

from turnrl import Trajectory
from turnrl_environments.rewards import ended, steps_of
from turnrl_environments.world import World

_logger = logging.getLogger(__name__)

_IN_A_ROW = 3
"""Iterations in a row in which environments end no attempt, if the first iteration has an end."""
_WHY = {
    "tool": "ran out of time",
    "turns": "used all {turns} turns",
    "length": "ran out of tokens",
    "answer": "answered",
    "player": "stopped",
}


class Endings(L.Callback):
    """Warn once if environments end no attempt: in the first iteration, or in three in a row
    later."""

    def __init__(self) -> None:
        self._missed, self._warned = 0, False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._missed, self._warned = 0, False

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Examine the attempts of this process."""
        worlds = [tool for tool in pl_module.rollout.toolsets if isinstance(tool, World)]
        experience = pl_module.experience  # none in a run that resumes
        if not worlds or experience is None or self._warned:
            return
        iteration = pl_module.position.iteration
        warning = warning_if_none_ended(
            experience.trajectories, iteration, pl_module.rollout.max_turns
        )
        self._missed = self._missed + 1 if warning else 0
        if warning and (iteration == 1 or self._missed >= _IN_A_ROW):
            self._warned = True
            if trainer.is_global_zero:
                _logger.warning(warning)


def warning_if_none_ended(
    trajectories: Sequence[Trajectory], iteration: int, max_turns: int
) -> str:
    """The warning about an iteration in which environments ended no attempt; empty if they ended
    one.

    Args:
        trajectories: The iteration's attempts.
        iteration: Its number.
        max_turns: The most turns of an attempt.
    """
    if not trajectories or any(map(ended, trajectories)):
        return ""
    counts = Counter(trajectory.ended_by for trajectory in trajectories)
    ways = [f"{count} {_WHY[why].format(turns=max_turns)}" for why, count in counts.most_common()]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    idle = sum(not steps_of(turn) for turn in turns)
    form = "If the policy knows no such action, teach it the form with 'turnrl warmup'. "
    end = "; if it acts as it should, have the environment end an attempt (done)"
    return (
        f"no attempt of iteration {iteration} was ended by its environment: of "
        f"{len(trajectories)}, {', '.join(ways)}; {idle} of {len(turns)} turns took no step. Read "
        f"transcripts/ in the run's folder. {form if 2 * idle > len(turns) else ''}If it "
        "avoids the task, let that cost more (unfinished and idle of EnvironmentReward); if it has "
        f"too little room, raise max_turns or model.rollout.max_turn_tokens{'' if idle else end}."
    )
