"""Environments that are classes of your own: `reset`, typed methods as tools, `get_reward`."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from turnrl import Question, RecipeError, ToolCall, ToolError, ToolResult, ToolSpec
from turnrl.agent.function_tools import to_result
from turnrl.agent.functions import FunctionDescription, describe_function
from turnrl.plugin.hooks import import_object
from turnrl_environments.own import OwnEpisode
from turnrl_environments.world import World, missing_columns_error, parse_reward, question_seed

_OWN = ("reset", "get_reward", "close")
_WANTED = "a text, or turnrl.ToolResult('the text', reward=1.0, done=True)"


@final
class Environment(World):
    """An environment that is a class of your own, in the shape of TRL's `environment_factory`. Each
    attempt has an instance. `reset(**columns)` begins it, with the columns of the question that its
    parameters name, and may return the first observation. Every other public method is a tool. A
    tool returns a text, another value that is written as one, or a `turnrl.ToolResult` with the
    step's `reward`, and `done` if the step ends the attempt. The policy reads an exception that its
    arguments provoke. `get_reward()`, if there is one, pays for the attempt as a whole
    (`EnvironmentOutcome`), and `close()` releases what an instance holds.

    Args:
        environment: The class, or its path, such as `my_module.Guess`.
        options: Arguments of the class.
        capacity: The most attempts that it can serve at once; null for any number.
        step_timeout_s: An attempt is lost and begins again if its environment takes longer than
            this many seconds for a call.
        thread_safe: True if attempts side by side do not disturb each other. False runs all their
            calls in one thread, one after another, for code that is made for one thread, like
            TextWorld, and for games that seed the process's random numbers in `reset`, like those
            of gem and TextArena.
    """

    def __init__(
        self,
        environment: str | Callable[..., Any],
        options: dict[str, Any] | None = None,
        capacity: int | None = None,
        step_timeout_s: float = 60.0,
        thread_safe: bool = True,
    ) -> None:
        cls = import_object("Environment.environment", environment)
        if not isinstance(cls, type):
            raise RecipeError(
                f"Environment.environment is {environment!r:.80}, which is no class. Give a class "
                "with reset and typed methods."
            )
        super().__init__(cls.__name__, capacity, step_timeout_s, thread_safe)
        self.made, self.options = cls, dict(options or {})
        try:
            with contextlib.suppress(ValueError):  # a class written in C may have no signature
                inspect.signature(cls).bind(**self.options)
        except TypeError as error:
            raise RecipeError(
                f"{self} cannot be made with the options {self.options} ({error}). Correct "
                "Environment.options."
            ) from error
        methods = {
            name: method
            for name, method in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_")
        }
        if "reset" not in methods:
            raise RecipeError(
                f"{self} has no reset, which begins an attempt. Add 'def reset(self, seed: int) -> "
                "str:' to the class, or 'def reset(self, **columns)'."
            )
        self.pays_at_the_end = "get_reward" in methods
        parameters = inspect.signature(methods["reset"]).parameters.values()
        self._reset_parameters = [
            p for p in parameters if p.name != "self" and p.kind is not p.VAR_POSITIONAL
        ]
        self._seed_type = {p.name: p.annotation for p in self._reset_parameters}.get("seed")
        self.tools: Mapping[str, FunctionDescription] = {
            name: describe_function(method, skip=("self",))
            for name, method in methods.items()
            if name not in _OWN
        }
        if not self.tools:
            raise RecipeError(
                f"{self} has no public method besides reset, so the policy can do nothing in it. "
                "Add one with a docstring and typed parameters."
            )

    @functools.cached_property
    def specs(self) -> Sequence[ToolSpec]:
        """A tool for each public method."""
        return tuple(tool.spec for tool in self.tools.values())

    def episode(self, question: Question) -> ClassEpisode:
        """An attempt that has not begun.

        Raises:
            DataError: If the question lacks a column that `reset` needs.
        """
        return ClassEpisode(self, question)

    def columns_of(self, question: Question) -> dict[str, object]:
        """The question's columns that `reset` takes. They are copies, because an attempt may change
        them.

        Raises:
            DataError: If the question lacks a column that `reset` needs.
        """
        return copy.deepcopy(self._take_columns(question))

    def check_questions(self, questions: Sequence[Question]) -> None:
        for question in questions:
            self._take_columns(question)

    def _take_columns(self, question: Question) -> dict[str, object]:
        """The question's columns that `reset` takes, as they are in the question."""
        about, parameters = question.columns, self._reset_parameters
        if "seed" in about and self._seed_type not in (str, "str"):
            about["seed"] = question_seed(question)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return about
        required = [p.name for p in parameters if p.default is p.empty]
        if lacking := [name for name in required if name not in about]:
            raise missing_columns_error(self, ", ".join(lacking), question)
        return {p.name: about[p.name] for p in parameters if p.name in about}


class ClassEpisode(OwnEpisode[Environment]):
    """An attempt in an instance of a class, which `reset` begins with columns of the question."""

    def __init__(self, world: Environment, question: Question) -> None:
        super().__init__(world, question)
        self.columns = world.columns_of(question)

    async def enter(self) -> str:
        await self.do("reset", self._make)
        reset = functools.partial(self.environment.reset, **self.columns)
        first = await self.do("reset", reset)
        if isinstance(first, tuple):
            raise _no_text(self.world, "reset", first, "a text, or nothing")
        return "" if first is None else to_result(first, f"{self.world} in reset").content

    def _make(self) -> None:
        self.environment = self.world.made(**copy.deepcopy(self.world.options))

    async def act(self, call: ToolCall) -> ToolResult:
        arguments = self.world.tools[call.name].bind(call.arguments)
        method = functools.partial(getattr(self.environment, call.name), **arguments)
        value = await self.take(call.name, method, self.world.made)
        if isinstance(value, tuple) and len(value) == 5:  # the five values of Gymnasium's step
            raise _no_text(self.world, call.name, value, _WANTED)
        result = to_result(value, f"{self.world} in {call.name}")
        return replace(result, reward=parse_reward(self.world, call.name, result.reward))

    async def outcome(self) -> float | None:
        if not self.world.pays_at_the_end:
            return None
        reward = await self.do("get_reward", self.environment.get_reward)
        return parse_reward(self.world, "get_reward", reward)


def _no_text(world: Environment, method: str, result: object, wanted: str) -> ToolError:
    """The error about a method that returns the values of Gymnasium's."""
    return ToolError(
        f"{world}: {method} returned {result!r:.80}; it must return {wanted}. If "
        f"{world.made.__name__} has Gymnasium's form, name it in make of Gymnasium."
    )
