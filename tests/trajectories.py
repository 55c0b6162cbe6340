"""Trajectories made by hand, turn after turn with their tokens."""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from turnrl import (
    Group,
    Merged,
    OutcomeOnly,
    Question,
    Reading,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    TurnLevel,
    TurnReward,
    assign_credit,
    score_group,
)
from turnrl.credit.estimators import Credit
from turnrl.engines import TokenScores
from turnrl.types import RewardComponent, Sample
from turnrl.watch.recorder import record_rows, write_rows
from turnrl_estimators import (
    CostsAmongRight,
    DiscountedReturn,
    GroupInGroup,
    PaperExact,
    PerTurnIndex,
)


@dataclass(frozen=True, kw_only=True)
class SampledTurn(Turn):
    """A turn with the tokens that it adds to a sample."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    observed: tuple[int, ...] = ()
    version: int = 0


def sampled_turn(text, ids, logprobs, reading=None, results=(), observed=(), cut=False, version=0):
    """A turn that sampled the tokens `ids`, after which the policy read `observed`."""
    return SampledTurn(
        text=text,
        reading=reading or Reading(),
        results=tuple(results),
        cut=cut,
        ids=tuple(ids),
        logprobs=tuple(logprobs),
        observed=tuple(observed),
        version=version,
    )


def trajectory(question, prompt, turns, ended_by, begins=0, **more):
    """A trajectory of one sample."""
    sample = Sample().read(prompt)
    for k, turn in enumerate(turns):
        sample = sample.wrote(k, turn.ids, turn.logprobs, turn.version).read(turn.observed)
    return Trajectory(question, tuple(turns), ended_by, (sample,), begins, **more)


def with_turns(whole, turns, ended_by="turns", question=None):
    """Another trajectory with the same prompt and other turns."""
    return trajectory(question or whole.question, whole.samples[0].prompt_ids, turns, ended_by)


def ids_of(whole, k):
    """The tokens of a turn."""
    return tuple(
        token
        for sample in whole.samples
        for token, turn in zip(sample.token_ids, sample.turn_index, strict=True)
        if turn == k
    )


def again(whole, k, **other):
    """A turn of a trajectory of one sample once more, with other settings."""
    turn, sample = whole.turns[k], whole.sample
    logprobs = (
        p for p, n in zip(sample.sampler_logprobs, sample.turn_index, strict=True) if n == k
    )
    as_before = {"reading": turn.reading, "results": turn.results, "observed": observed(whole, k)}
    return sampled_turn(
        turn.text, ids_of(whole, k), logprobs, **(as_before | {"cut": turn.cut} | other)
    )


def observed(whole, k):
    """The tokens that the policy read right after a turn: results and chat markup."""
    (sample,) = (history for history in whole.samples if k in history.turn_index)
    after = len(sample) - sample.turn_index[::-1].index(k)
    later = (n for n in range(after, len(sample)) if sample.turn_index[n] >= 0)
    return sample.token_ids[after : next(later, None)]


QUESTION = Question("q", "The capital?", ("Paris",))
CALL = ToolCall("search", {"query": "capital"})


def turn(calls=0, results=(), answer=None, error=None, tokens=2):
    """A turn of so many tokens that makes so many calls, or answers, or is not well formed."""
    reading = Reading((CALL,) * calls, answer, error)
    return sampled_turn("", (7,) * tokens, (-0.5,) * tokens, reading, tuple(results))


def attempt(*turns, stop="turns"):
    """A trajectory of these turns."""
    return trajectory(QUESTION, (1, 2, 3), turns, stop)


class Calls(TurnReward):
    """0.1 for each call of the turn, and its number."""

    def score(self, trajectory, turn):
        return 0.1 * len(trajectory.turns[turn].reading.calls) + turn


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


def draw_attempt(draw, question, turns, text=None, version=0):
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
    trajectories = tuple(draw_attempt(draw, question, count, text, version) for count in lengths)
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
        "outcome/right": RewardComponent(outcome.double(), right_at=0.4),
    }
    return Group(
        question,
        trajectories,
        turn_rewards,
        outcome,
        reached,
        parts,
    )


def row(turns=1, **columns):
    """A valid row of a record, with some columns of its own."""
    question = Question("q", "?", ("x",))
    made = [sampled_turn("", (7, 7), (-0.5, -0.5)) for _ in range(turns)]
    scored = score_group([trajectory(question, (1, 2, 3), made, "answer")], [], turns)
    return next(record_rows([scored], [None], "val", 0, 0)) | columns


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
        kept = record_rows(made, credit, "train", k + 1, k, estimator=estimator, learner=learner)
        write_rows(list(kept), folder / "record" / f"train-{k:06d}-0.parquet")
    return folder
