"""Records of runs that never took place: random groups with credit, written to files."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import torch
import yaml

from trajectories import sampled_turn, trajectory
from turnrl import (
    Credit,
    Group,
    Merged,
    OutcomeOnly,
    Question,
    Reading,
    RewardComponent,
    TokenScores,
    ToolCall,
    ToolResult,
    TurnLevel,
    assign_credit,
)
from turnrl.watch.recorder import rows, write
from turnrl_estimators import (
    CostsAmongRight,
    DiscountedReturn,
    GroupInGroup,
    PaperExact,
    PerTurnIndex,
)

RULES = [
    rule
    for options in (
        {},
        {"baseline": "leave_one_out", "min_std": 0.4},
        {"scale": "none"},
        {"baseline": "leave_one_out", "scale": "none"},
    )
    for rule in (
        OutcomeOnly(**options),
        Merged(**options),
        TurnLevel(gamma=0.9, outcome_coef=0.7, turn_coef=0.5, **options),
        PerTurnIndex(**options),
        DiscountedReturn(gamma=0.6, **options),
        GroupInGroup(gamma=0.8, omega=0.3, **options),
        CostsAmongRight(gamma=0.9, outcome_coef=0.7, turn_coef=0.5, cost_coef=1.3, **options),
    )
] + [PaperExact(), PaperExact(turn_coef=0.3)]
"""Every estimator that needs only rewards. Each setting differs from its default somewhere."""


def attempt(draw, question, turns, text=None, version=0):
    """One trajectory that calls a tool in all its turns but the last."""
    made = []
    for k in range(turns):
        words = text() if text else f"turn {k} of {question.id}: {draw.random()}"
        ids = tuple(draw.choices(range(100), k=draw.randint(1, 12)))
        calls = (ToolCall("search", {"query": words}),) * (k < turns - 1)
        content = text() if text else f"a passage {draw.randint(0, 2)}"
        results = tuple(ToolResult(content, ok=draw.random() < 0.8) for _ in calls)
        answer = (text() if text else "an answer") if k == turns - 1 else None
        reading = Reading(
            calls, answer, (text() if text else "bad") if draw.random() < 0.2 else None
        )
        made.append(sampled_turn(words, ids, (-0.5,) * len(ids), reading, results, version=version))
    opening = text() if text else f"a room\nof {question.id}"
    return trajectory(question, (1, 2, 3), made, "answer", opening=opening)


def group(draw, number, size=4, turns=(1, 4), text=None, version=0):
    """A scored group; rewards are multiples of 0.1, so that some are alike."""
    words = text() if text else f"question {number}?"
    question = Question(f"q{number}", words, (text() if text else "an answer",))
    lengths = [draw.randint(*turns) for _ in range(size)]
    trajectories = tuple(attempt(draw, question, count, text, version) for count in lengths)
    turn_rewards = torch.zeros(size, max(lengths))
    reached = torch.zeros(size, max(lengths), dtype=torch.bool)
    for i, count in enumerate(lengths):
        reached[i, :count] = True
        turn_rewards[i, :count] = torch.tensor([draw.randint(0, 5) / 10 for _ in range(count)])
    outcome = torch.tensor([draw.randint(0, 10) / 10 for _ in range(size)])
    cost = -0.1 * torch.arange(max(lengths)) * reached
    parts = {
        "turn/paid": RewardComponent((turn_rewards - cost).double()),
        "turn/cost": RewardComponent(cost.double(), is_cost=True),
        "outcome/right": RewardComponent(outcome.double(), bounds=(0.0, 1.0), right_at=0.4),
    }
    return Group(
        question,
        trajectories,
        turn_rewards,
        outcome,
        reached,
        parts,
    )


def noted(read):
    """A learner that gives every token the same numbers."""
    sizes = [sum(asked) for _, asked in read]
    return [TokenScores(*(torch.full((n,), v) for v in (-0.7, 1.1, 0.0))) for n in sizes]


def run(
    folder: Path,
    iterations=3,
    groups=2,
    size=4,
    estimator=None,
    seed=0,
    tokens=False,
    text=None,
    turns=(1, 4),
    settings=None,
) -> Path:
    """The folder of a run with metrics, a recipe and a record."""
    estimator, draw = estimator or TurnLevel(), random.Random(seed)
    (folder / "record").mkdir(parents=True)
    recipe = {"seed_everything": seed, "model": {"estimator": type(estimator).__name__}}
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe | (settings or {})))
    with (folder / "metrics.csv").open("w", newline="") as file:
        metrics = csv.DictWriter(file, ["iteration", "train/exact_match", "val/exact_match"])
        metrics.writeheader()
        for k in range(iterations):
            metrics.writerow(dict(zip(metrics.fieldnames, (k + 1, k / 10, k / 9), strict=True)))
    for k in range(iterations):
        made = [group(draw, n, size, turns, text, k) for n in range(groups)]
        credit: list[Credit] = [assign_credit(scored, estimator) for scored in made]
        learner = noted if tokens else None
        kept = rows(made, credit, "train", k + 1, k, estimator=estimator, learner=learner)
        write(list(kept), folder / "record" / f"train-{k:06d}-0.parquet")
    return folder
