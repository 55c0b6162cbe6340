"""Questions of your own: let a policy answer them, and score its answers."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from turnrl.plugin.errors import DataError, RecipeError, check_at_least
from turnrl.rewards import scoring
from turnrl.training.collection import Collector
from turnrl.types import Question, Trajectory


def check_sampling(samples: int | None, seed: int, temperature: float | None) -> None:
    """Refuse arguments of `MTGRPO.ask` that make sampling impossible.

    Raises:
        RecipeError: Naming the argument and its value.
    """
    arguments = SimpleNamespace(samples=samples, seed=seed, temperature=temperature)
    check_at_least(1, "", arguments, "samples", whole=True)
    check_at_least(0, "", arguments, "seed", whole=True, optional=False)
    check_at_least(0, "", arguments, "temperature")
    if temperature == 0 and samples is not None:
        raise RecipeError(
            f"temperature is 0, which is greedy, so {samples} samples would be one. Leave out "
            "samples, or raise temperature."
        )


def ask(
    collector: Collector,
    questions: str | Question | Sequence[str | Question],
    samples: int | None,
    temperature: float | None,
    key: tuple[int, ...],
    bar: str | None,
) -> list[Trajectory]:
    """Trajectories of questions that need no accepted answers; see `MTGRPO.ask`."""
    listed = isinstance(questions, Sequence) and not isinstance(questions, str)
    several: Any = questions if listed else [questions]
    asked = [
        Question(str(n), question) if isinstance(question, str) else question
        for n, question in enumerate(several)
    ]
    for question in asked:
        if not isinstance(question, Question):
            raise RecipeError(f"cannot ask {question!r}; ask texts, or turnrl.Question objects")
    rollout = collector.parts.rollout
    if temperature:
        samples, rollout = samples or 1, replace(rollout, temperature=temperature)
    attempts = collector.explore(asked, samples, key, bar, rollout=rollout)
    return [trajectory for group in attempts.trajectories for trajectory in group]


def scores(collector: Collector, trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:
    """The curves and rewards of each trajectory; see `MTGRPO.scores`."""
    for trajectory in trajectories:
        if not trajectory.question.answers:
            asked = f"{trajectory.question.text!r} has no accepted answer to compare with"
            raise DataError(f"{asked}. Ask turnrl.Question(id, text, answers) instead.")
    groups = collector.score([[trajectory] for trajectory in trajectories])
    figures = [scoring.tally_groups([group], collector.parts.rewards) for group in groups]
    return [{name: tally.total for name, tally in tallies.items()} for tallies in figures]
