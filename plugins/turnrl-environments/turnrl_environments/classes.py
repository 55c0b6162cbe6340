"""Environments that are classes of your own: `reset`, typed methods as tools, `get_reward`."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from turnrl import (
    Described,
    Question,
    RecipeError,
    ToolCall,
    ToolError,
    ToolResult,
    ToolSpec,
    described,
    named,
)
from turnrl_environments.own import OwnEpisode
from turnrl_environments.world import World, missing, paid

_OWN = ("reset", "get_reward", "close")


@final
class Environment(World):
    """An environment that is a class of your own, in the shape of TRL's `environment_factory`. Each
    attempt has an instance. `reset(**columns)` begins it, with the columns of the question that it
    names, and may return the first observation. Every other public method is a tool. A tool returns
    a text, or a `turnrl.ToolResult` with the reward of the step and whether it ends the attempt.
    `get_reward()`, if there is one, pays for the attempt as a whole (`EnvironmentOutcome`), and
    `close()` gives back what an instance holds.

    Args:
        environment: The class, or its path, such as `my_module.Guess`.
        options: Arguments of the class.
        capacity: How many attempts it can serve at once; null for any number.
        step_timeout_s: An attempt whose environment takes longer than this many seconds for a turn,
            or to begin, is lost and begins again.
        thread_safe: Whether attempts side by side do not disturb each other. False runs all their
            calls in one thread, one after another, and gives each attempt random numbers of its
            own (`random` and `numpy.random`): for games that draw from the process's, as those of
            gem and TextArena do, and for what is made for one thread, as TextWorld is.
    """

    def __init__(
        self,
        environment: str | Callable[..., Any],
        options: dict[str, Any] | None = None,
        capacity: int | None = None,
        step_timeout_s: float = 60.0,
        thread_safe: bool = True,
    ) -> None:
        made = named("Environment.environment", environment)
        if not isinstance(made, type):
            raise RecipeError(
                f"Environment.environment is {environment!r:.80}, which is no class. Give a class "
                "with reset and typed methods."
            )
        super().__init__(made.__name__, capacity, step_timeout_s, thread_safe)
        self.made, self.options = made, dict(options or {})
        _check_options(self)
        methods = {
            name: method
            for name, method in inspect.getmembers(made, inspect.isfunction)
            if not name.startswith("_")
        }
        if "reset" not in methods:
            raise RecipeError(
                f"{self} has no reset, which begins an attempt. Add 'def reset(self, seed: int) -> "
                "str:' to the class, or 'def reset(self, **columns)'."
            )
        waits = [name for name, one in methods.items() if inspect.iscoroutinefunction(one)]
        if waits and not thread_safe:
            raise RecipeError(
                f"{self} has the coroutine {', '.join(waits)}, and with thread_safe: false calls "
                "run in one thread. Write 'def' in place of 'async def', or leave thread_safe "
                "out."
            )
        self.pays_at_the_end = "get_reward" in methods
        for name, method in methods.items():
            _check_self(self, name, method)
        self._taken = _taken_by_reset(self, methods["reset"])
        self.tools: Mapping[str, Described] = {
            name: described(method, skip=("self",))
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

    def episode(self, question: Question) -> Stay:
        """An attempt that has not begun.

        Raises:
            DataError: If the question lacks a column that `reset` needs.
        """
        return Stay(self, question)

    def columns_of(self, question: Question) -> dict[str, object]:
        """What `reset` takes of a question, as a copy: an attempt may change what it was given.

        Raises:
            DataError: If the question lacks a column that `reset` needs.
        """
        about = question.columns
        taken = self._taken
        if any(one.kind is one.VAR_KEYWORD for one in taken):
            return copy.deepcopy(about)
        needed = [one.name for one in taken if one.default is one.empty and one.name not in about]
        if needed:
            raise missing(self, ", ".join(needed), question)
        return copy.deepcopy({one.name: about[one.name] for one in taken if one.name in about})


class Stay(OwnEpisode[Environment]):
    """An attempt in an instance of a class, which `reset` begins with columns of the question."""

    def __init__(self, world: Environment, question: Question) -> None:
        super().__init__(world, question)
        self.columns = world.columns_of(question)

    async def enter(self) -> str:
        await self.do("reset", self._make)
        reset = functools.partial(self.environment.reset, **self.columns)
        first = await self.do("reset", reset)
        return "" if first is None else _text(self.world, "reset", first, "a text, or nothing")

    def _make(self) -> None:
        self.environment = self.world.made(**copy.deepcopy(self.world.options))

    async def act(self, call: ToolCall) -> ToolResult:
        arguments = self.world.tools[call.name].bind(call.arguments)
        method = functools.partial(getattr(self.environment, call.name), **arguments)
        given = await self.do(call.name, method)
        if isinstance(given, ToolResult):
            paid(self.world, call.name, given.reward)
            return given
        result = "a text, or turnrl.ToolResult('the text', reward=1.0, done=True)"
        return ToolResult(_text(self.world, call.name, given, result))

    async def outcome(self) -> float | None:
        if not self.world.pays_at_the_end:
            return None
        given = await self.do("get_reward", self.environment.get_reward)
        return paid(self.world, "get_reward", given)


def _text(world: Environment, method: str, given: object, wanted: str) -> str:
    """A text that a method gave.

    Raises:
        ToolError: If it is none.
    """
    if isinstance(given, str):
        return given
    form = (
        f" If {world.made.__name__} has Gymnasium's form, name it in make of Gymnasium."
        if isinstance(given, tuple)
        else ""
    )
    raise ToolError(
        f"{world} gave {given!r:.80} from {method}, which is no text. Return {wanted}.{form}"
    )


def _check_options(world: Environment) -> None:
    """Refuse options that the class does not take.

    Raises:
        RecipeError: If it takes others.
    """
    try:
        taken = inspect.signature(world.made)
    except (TypeError, ValueError):  # a class that is written in C does not say
        return
    try:
        taken.bind(**world.options)
    except TypeError as error:
        raise RecipeError(
            f"{world} cannot be made with the options {world.options} ({error}). Correct "
            "Environment.options."
        ) from error


def _check_self(world: Environment, name: str, method: Callable[..., object]) -> None:
    """Refuse a method that lacks its first parameter.

    Raises:
        RecipeError: If it does.
    """
    if isinstance(inspect.getattr_static(world.made, name), staticmethod):
        return
    parameters = list(inspect.signature(method).parameters.values())
    if not parameters or (
        parameters[0].name != "self" and parameters[0].kind is not parameters[0].VAR_POSITIONAL
    ):
        raise RecipeError(
            f"the method {name} of {world} lacks self. Write 'def {name}"
            f"({', '.join(['self', *map(str, parameters)])})'."
        )


def _taken_by_reset(
    world: Environment, reset: Callable[..., object]
) -> Sequence[inspect.Parameter]:
    """The parameters of `reset`, which are columns.

    Raises:
        RecipeError: If one of them cannot be given by its name.
    """
    taken = [one for one in inspect.signature(reset).parameters.values() if one.name != "self"]
    for one in taken:
        if one.kind is one.POSITIONAL_ONLY:
            raise RecipeError(
                f"reset of {world} takes {one.name!r} by its place, and columns of the question "
                "are given by their names. Take the '/' out of its 'def'."
            )
    return [one for one in taken if one.kind is not one.VAR_POSITIONAL]
