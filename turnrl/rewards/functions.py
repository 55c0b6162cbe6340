"""Functions as rewards: for an attempt, for a turn, or for a batch in TRL's signature."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any, final

from turnrl.agent.functions import get_parameters, name_function
from turnrl.agent.running import on_loop
from turnrl.plugin.errors import (
    DataError,
    PluginError,
    RecipeError,
    check_numbers,
)
from turnrl.types import Question, Reward, SampledPolicy, ToolCall, Trajectory

_OWN = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not pass to reward functions: it passes its own values of these names."""
_OF_BATCH = ("prompts", "completions", "completion_ids", "log_metric")
_OF_ATTEMPT = ("trajectory", "turn")
"""Parameters that are no columns: those of a function that scores batches, and of any other."""
_ANSWER = ("answer", "solution", "ground_truth", "target")
"""Parameter names that get the accepted answer, unless the data have a column of that name."""


@final
class FunctionReward(Reward):
    """A function as a reward; `rewards` also takes the function itself. In metrics it has the
    function's name. Its parameters decide what it scores:

        def f(trajectory)               a whole attempt
        def f(trajectory, turn)         turn number `turn`, from 0
        def f(completions, **columns)   a batch of attempts, as TRL calls it: a list of numbers

    Any other parameter is a column of the data, by its name. The accepted answers come as
    `answers`, a list of texts, and the first one as `answer`, `solution`, `ground_truth` or
    `target`; for a batch, a column of that name comes as it is in the data.

    Args:
        function: The function. It may be async if it scores a batch.
        weight: Factor of the function's result.
        name: Its name in metrics; None for the function's name.
        is_cost: True if it is a price of acting; see `Reward.is_cost`.
        right_at: The least score of a right attempt, weight included, if the function decides
            which attempts are right; see `Reward.right_at`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        weight: float = 1.0,
        name: str | None = None,
        is_cost: bool = False,
        right_at: float | None = None,
    ) -> None:
        self.weight, self.is_cost, self.right_at = weight, is_cost, right_at
        check_numbers("FunctionReward.", self, "weight", optional=False)
        which = name_function(function)
        bound = function.keywords if isinstance(function, partial) else {}
        taken = [p for p in get_parameters(function) if p.name not in bound]
        names = [p.name for p in taken]
        self.of_batch = "completions" in names
        self.by_turn = not self.of_batch and "turn" in names
        if not self.of_batch and "trajectory" not in names:
            raise RecipeError(
                f"the function {which} takes ({', '.join(map(str, taken))}), and a reward takes "
                f"an attempt: write 'def {which.rpartition('.')[2]}(trajectory)'. A reward of "
                "turns takes (trajectory, turn), and one in TRL's signature (completions, "
                "**columns)."
            )
        if not self.of_batch and inspect.iscoroutinefunction(function):
            raise RecipeError(
                f"the function {which} is async, which only a reward of a batch may be. Write it "
                "without async, or take (completions, **columns)."
            )
        self.name = name or which.rpartition(".")[2].lower()
        self._which, self._function = which, function
        self._bound = bound
        self._open = any(p.kind is p.VAR_KEYWORD for p in taken)
        named = [p for p in taken if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self._needs = {p.name: p.default is p.empty for p in named}
        self._seen: dict[str, None] = {}
        """The columns that some question of the data has, once they have been checked."""
        self._paid: dict[int, tuple[Trajectory, float]] = {}

    def __str__(self) -> str:
        return f"the function {self._which}"

    def check_questions(self, questions: Sequence[Question]) -> None:
        """Refuse questions without a column that the function takes. A function that scores batches
        gets None for a column that only other questions have, as in TRL."""
        own = dict.fromkeys(_OF_BATCH if self.of_batch else _OF_ATTEMPT)
        for some in [questions] if self.of_batch else ([question] for question in questions):
            self._columns(some, own)
        self._seen |= {name: None for question in questions for name in self._row(question)}

    def prepare(
        self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None
    ) -> Mapping[str, float] | None:
        """If the function scores batches, have it score all trajectories at once."""
        if not self.of_batch or not trajectories:
            return None
        paid, figures = self._score_batch(trajectories)
        self._paid = {id(t): (t, score) for t, score in zip(trajectories, paid, strict=True)}
        return figures

    def _score_batch(
        self, trajectories: Sequence[Trajectory]
    ) -> tuple[list[float], Mapping[str, float]]:
        """The scores that the function returns for a batch, and the figures that it logs."""
        logged: dict[str, list[float]] = {}

        def log_metric(name: str, value: Any) -> None:
            logged.setdefault(name, []).append(float(value))

        returned = self._function(**self._of_batch(trajectories, log_metric))
        if inspect.iscoroutine(returned):
            returned = on_loop(returned)
        listed = not isinstance(returned, str | Mapping) and hasattr(returned, "__len__")
        if not listed or len(returned) != len(trajectories):
            raise PluginError(
                f"{self} returned {returned!r:.80} for {len(trajectories)} completions. Return a "
                "list with a number for each of them."
            )
        # None or NaN: the function does not apply to a completion; TRL leaves it out of its sum
        paid = [self._weigh(score) if _applies(score) else 0.0 for score in returned]
        return paid, {name: fmean(values) for name, values in logged.items()}

    def score(self, trajectory: Trajectory, *turn: int) -> float:
        """The function's result times the weight."""
        if self.of_batch:
            prepared = self._paid.get(id(trajectory))
            return prepared[1] if prepared else self._score_batch([trajectory])[0][0]
        own = {"trajectory": trajectory, **({"turn": turn[0]} if turn else {})}
        columns = self._columns([trajectory.question], own)
        row = {name: value for name, (value,) in columns.items()}
        paid: float = self._weigh(self._function(**row | own))
        return paid

    def _weigh(self, score: Any) -> Any:
        """The score times the weight. What is no number stays as it is, to be refused."""
        if self.weight == 1.0 or score is None or isinstance(score, str):
            return score
        return self.weight * float(score)  # a tensor's half precision would round the product

    def _columns(
        self, questions: Sequence[Question], own: Mapping[str, object]
    ) -> dict[str, list[object]]:
        """The columns of the data that the function takes, with a value per question."""
        rows = [self._row(question) for question in questions]
        known = chain(*rows, self._seen if self.of_batch else ())
        columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(known)}
        for name, needed in self._needs.items():
            if needed and name not in own and name not in columns:
                raise DataError(
                    f"{self} takes {name!r}, which is not a column of the question "
                    f"{questions[0].id!r}. It has {', '.join(columns)}. Add the column to the "
                    "data, or give the parameter a default."
                )
        taken = (name for name in columns if name in self._needs or self._open)
        return {name: columns[name] for name in taken if name not in self._bound}

    def _row(self, question: Question) -> dict[str, object]:
        """The columns of one question. As in TRL, a batch gets the data's own `answer`, which may
        be a number, and nulls; other functions rely on the accepted text."""
        answers = dict.fromkeys(_ANSWER, question.answers[0] if question.answers else None)
        if not self.of_batch:
            return {**question.columns, **answers, **question.metadata}
        row = {name: value for name, value in question.row.items() if name not in _OWN}
        return {**answers, **row, "answers": [*question.answers], **question.metadata}

    def _of_batch(
        self, trajectories: Sequence[Trajectory], log_metric: Callable[[str, Any], None]
    ) -> dict[str, object]:
        """The arguments that TRL passes to a reward function. Prompts and completions are plain
        texts where TRL has them: the data ask in texts, and there is nothing to call."""
        in_text = not any(map(_is_chat, trajectories))
        of_trl = {
            "prompts": [t.question.text if in_text else _prompt(t.question) for t in trajectories],
            "completions": [_text(t) if in_text else _completion(t) for t in trajectories],
            "completion_ids": [_completion_ids(trajectory) for trajectory in trajectories],
            "log_metric": log_metric,
        }
        columns = self._columns([trajectory.question for trajectory in trajectories], of_trl)
        own = {name: v for name, v in of_trl.items() if name in self._needs or self._open}
        return {**columns, **own}


def _applies(score: Any) -> bool:
    """False for None and NaN."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return not math.isnan(score)
    return score is not None


def _prompt(question: Question) -> list[dict[str, str]]:
    system = [{"role": "system", "content": question.system}] if question.system else []
    return [*system, {"role": "user", "content": question.text}]


def _is_chat(trajectory: Trajectory) -> bool:
    """True if TRL would hand over an attempt as chat messages."""
    asked = trajectory.question
    return bool(asked.is_chat or asked.system or trajectory.tools or trajectory.results)


def _text(trajectory: Trajectory) -> str:
    return "\n".join(turn.text for turn in trajectory.turns)


def _completion(trajectory: Trajectory) -> list[dict[str, object]]:
    """The turns with their calls, and the results that the policy read, as chat messages."""
    messages = list[dict[str, object]]()
    for turn in trajectory.turns:
        calls = turn.reading.calls
        message: dict[str, object] = {"role": "assistant", "content": turn.text}
        if readable := [_tool_call(call) for call in calls if call.error is None]:
            message["tool_calls"] = readable
        messages.append(message)
        messages += (
            {"role": "tool", "name": call.name, "content": result.content}
            for call, result in zip(calls, turn.results, strict=False)
            if result.unread is None
        )
    return messages


def _tool_call(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": copy.deepcopy(dict(call.arguments))}
    return {"type": "function", "function": function}


def _completion_ids(trajectory: Trajectory) -> list[int]:
    return [i for sample in trajectory.samples for i in sample.token_ids[len(sample.prompt_ids) :]]
