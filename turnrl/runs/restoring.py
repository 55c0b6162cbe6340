"""Rows of a record, restored to the scored group that they record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from turnrl.runs.columns import RecordedAttempt, Row, restore
from turnrl.types.group import Group, RewardComponent
from turnrl.types.questions import Question
from turnrl.types.trajectory import Sample, Trajectory

if TYPE_CHECKING:
    from torch import Tensor


def restore_group(rows: Sequence[Row]) -> Group:
    """The scored group that rows record, for giving it credit again.

    Its token ids are zeros, as many as were sampled. The record lacks the other inputs of
    estimators (state values, a critic's values).

    Args:
        rows: All members of one group, in order; see `record.groups`.
    """
    import torch

    attempts: list[RecordedAttempt] = [restore(RecordedAttempt, row) for row in rows]
    shape = len(rows), max(len(attempt.turns) for attempt in attempts)
    turn_rewards, reached = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for i, attempt in enumerate(attempts):
        earned = [turn.turn_reward for turn in attempt.turns]
        turn_rewards[i, : len(earned)] = torch.tensor(earned)
        reached[i, attempt.begins : len(earned)] = True
    trajectories = tuple(map(_restore_trajectory, attempts))
    branched = any(attempt.parent is not None for attempt in attempts)
    trunks = tuple(i if one.parent is None else one.parent for i, one in enumerate(attempts))
    return Group(
        trajectories[0].question,
        trajectories,
        turn_rewards,
        torch.tensor([attempt.outcome for attempt in attempts]),
        reached,
        _components(attempts, shape),
        parents=trunks if branched else (),
    )


def _components(
    attempts: Sequence[RecordedAttempt], shape: tuple[int, int]
) -> dict[str, RewardComponent]:
    import torch

    right_at = {part.name: part.value for part in attempts[0].right_at}
    values: dict[str, Tensor] = {}
    for i, attempt in enumerate(attempts):
        for part in attempt.rewards:
            by_turn = part.name.startswith("turn/")
            empty = torch.zeros(shape if by_turn else shape[:1], dtype=torch.float64)
            own = values.setdefault(part.name, empty)
            if not by_turn:
                own[i] = part.value
        for k, turn in enumerate(attempt.turns):
            for part in turn.rewards:
                values[part.name][i, k] = part.value
    return {
        name: RewardComponent(own, name in attempts[0].costs, right_at.get(name))
        for name, own in values.items()
    }


def _restore_trajectory(attempt: RecordedAttempt) -> Trajectory:
    # if the answers are unknown, any will do, because nothing is scored again
    answers = tuple(filter(None, attempt.answers)) or ("",)
    sample = Sample().read((0,) * (attempt.prompt_tokens or 0))
    for k, turn in enumerate(attempt.turns):
        sample = sample.wrote(k, (0,) * turn.tokens, (0.0,) * turn.tokens)
    return Trajectory(
        question=Question(attempt.question_id or attempt.question, attempt.question, answers),
        turns=tuple(turn.turn for turn in attempt.turns),
        ended_by=attempt.ended_by,
        samples=(sample,),
        begins=attempt.begins,
        opening=attempt.opening,
    )
