"""Questions from a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

from turnrl.agent.functions import get_parameters, name_function
from turnrl.data.fields import Fields, make_questions
from turnrl.plugin.errors import DataError, RecipeError, blaming, describe_value
from turnrl.plugin.hooks import import_object
from turnrl.types.contracts import QuestionSource
from turnrl.types.questions import Question


@final
class FunctionQuestions(QuestionSource):
    """The questions of a function that returns or yields rows, as mappings, or questions. If it has
    a parameter `split`, or a parameter without a default, it has the splits `train` and `val`.

    Args:
        function: The function.
        fields: The fields of id, question and answers in its rows.
    """

    uses: tuple[str, ...] = ("fields",)

    def __init__(self, function: Callable[..., Any], fields: Fields | None = None) -> None:
        self._function, self._fields = function, fields or Fields()
        self._which = f"the function {name_function(function)}"
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        taken = [p for p in get_parameters(function) if p.kind in named]
        names = [p.name for p in taken if p.default is p.empty or p.name == "split"]
        if len(names) > 1 or inspect.iscoroutinefunction(function):
            raise DataError(
                f"{self._which} cannot be called for questions: it takes {', '.join(names)}. Write "
                "a plain function without parameters, or with one, the name of the split."
            )
        self._split = next(iter(names), None)
        train, val = ("train", "val") if names else ("", "")
        self.default_splits = {"train": train, "val": val}

    def questions(self, split: str) -> Iterable[Question]:
        if split and self._split is None:
            raise DataError(
                f"{self._which} has no splits; leave out the split {split!r}, or give it a "
                "parameter 'split'."
            )
        with blaming(DataError, self._which, "Fix the function."):
            returned = self._function(**({} if self._split is None else {self._split: split}))
            single = isinstance(returned, str | Mapping)
            rows: list[Any] = [returned] if single else list(returned or ())
        if rows and all(isinstance(row, Question) for row in rows):
            self.uses = ()  # the questions are already made
            return rows
        odd = [row for row in rows if not isinstance(row, Mapping)]
        if odd or isinstance(returned, Mapping):
            first = returned if isinstance(returned, Mapping) else odd[0]
            raise DataError(
                f"{self._which} gives {describe_value(first)}, {first!r:.60}, which is not a "
                "question. Return or yield rows as mappings, or turnrl.Question objects, and only "
                "one kind of them."
            )
        return make_questions(rows, self._fields, self._which)


def import_function(path: str) -> Callable[..., object] | None:
    """The function at a dotted path; None if nothing has that name, or if it is not a function.

    Raises:
        DataError: If its module cannot be imported.
    """
    module = path.rpartition(".")[0]
    try:
        function: Callable[..., object] = import_object("the source of the questions", path)
    except RecipeError as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if cause is None or f"{module}.".startswith(f"{missing}."):
            return None
        raise DataError(str(error)) from cause
    return function if inspect.isroutine(function) else None
