"""Environments of Gymnasium's form: `reset`, and a `step` that returns five values."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from turnrl import Question, RecipeError, ToolCall, ToolError, ToolResult, ToolSpec
from turnrl.plugin.errors import is_bool_like, summarize_error
from turnrl.plugin.hooks import import_object
from turnrl_environments.own import OwnEpisode, close
from turnrl_environments.world import TRUNCATED, World, check_text, parse_reward, question_seed

_COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", re.DOTALL)

Observe = Callable[[Any], str]


@final
class Gymnasium(World):
    """An environment of Gymnasium, or of its form, whose action is a text, a number, or a value
    from a list. The policy calls the tool `step` with an `action`. Each attempt has an environment
    of its own, which begins with the seed of its question (`Seeds`).

    Args:
        id: The id for `gymnasium.make`, such as `FrozenLake-v1`.
        options: Arguments of the environment, such as `{is_slippery: false}`.
        actions: Words for the actions 0, 1, 2, ... of a discrete environment, or the texts that an
            environment takes. By default a discrete action is a number.
        observe: Turns an observation into a text: a function, or its path. By default the policy
            reads `str(observation)`, or, if `options` has `render_mode: ansi`, the rendered text
            with coloured letters in brackets.
        make: In place of `id`, makes an environment from `options`: a function or a class, or its
            path. The environment has `reset(seed=...)` and `step(action)`; without an
            `action_space`, its action is a text.
        description: The tool's description for the policy; by default its name and actions.
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
        id: str | None = None,
        options: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        observe: str | Observe | None = None,
        make: str | Callable[..., Any] | None = None,
        description: str | None = None,
        capacity: int | None = None,
        step_timeout_s: float = 60.0,
        thread_safe: bool = True,
    ) -> None:
        if (id is None) == (make is None):
            raise RecipeError(
                "Gymnasium takes an id, such as FrozenLake-v1, or a function in make, and exactly "
                "one of them."
            )
        plain = inspect.isclass(make) or inspect.isroutine(make)
        name = make.__name__ if plain else str(id or make)  # type: ignore[union-attr]
        super().__init__(name, capacity, step_timeout_s, thread_safe)
        self.options = dict(options or {})
        self.actions = actions
        self.observe: Observe | None = None
        if observe is not None:
            self.observe = import_object("Gymnasium.observe", observe)
        self.description = description
        maker: Callable[..., object] = functools.partial(_make_registered, str(id))
        self._maker = maker if make is None else import_object("Gymnasium.make", make)

    @functools.cached_property
    def specs(self) -> Sequence[ToolSpec]:
        """The tool `step`. This makes an environment to find out its actions."""
        schema, _ = self._action_form
        words = f" The actions are {', '.join(schema['enum'])}." if "enum" in schema else ""
        parameters = {
            "type": "object",
            "properties": {"action": schema},
            "required": ["action"],
            "additionalProperties": False,
        }
        description = self.description or f"Take one step in {self.name}.{words}"
        return (ToolSpec("step", description, parameters),)

    @functools.cached_property
    def _action_form(self) -> tuple[Mapping[str, Any], Callable[[object], object]]:
        """JSON Schema of an action, and the function that turns one into the environment's own."""
        try:
            environment = self.make()
        except RecipeError:
            raise
        except Exception as error:
            raise RecipeError(
                f"{self} cannot be made with the options {self.options} "
                f"({summarize_error(error)}). "
                "Correct id, make or options of Gymnasium."
            ) from error
        try:
            # an environment from `make` need not have an action_space
            return _actions(self.name, getattr(environment, "action_space", None), self.actions)
        finally:
            with contextlib.suppress(Exception):  # it may hold nothing before it is reset
                close(environment)

    def make(self) -> object:
        """A new environment, before its `reset`."""
        return self._maker(**copy.deepcopy(self.options))

    def episode(self, question: Question) -> GymEpisode:
        """An attempt that begins with the question's `seed` and `options`, if it has them. A
        question without a seed gets one computed from its id."""
        return GymEpisode(self, question)

    def render_observation(self, verb: str, environment: Any, observation: object) -> str:
        """An observation as the policy reads it."""
        if self.observe is not None:
            return check_text(self, f"observe, after {verb}", self.observe(observation))
        if self.options.get("render_mode") == "ansi":
            drawn = check_text(self, f"render, after {verb}", environment.render())
            return _COLOURED.sub(r"[\1]", drawn).strip()
        return str(observation)

    def take_step(self, environment: Any, action: object) -> object:
        """The values of a step.

        Raises:
            ToolError: If a wrapper of Gymnasium cannot unpack what the environment returns.
        """
        _, to_own = self._action_form
        try:
            return environment.step(to_own(action))
        except (TypeError, ValueError) as error:
            last = traceback.extract_tb(error.__traceback__)[-1].filename
            if "unpack" in str(error) and "gymnasium" in Path(last).parts:
                raise self._wrong_form(summarize_error(error)) from error
            raise

    def result(self, environment: Any, values: Any) -> ToolResult:
        """The result of a step that returned these values."""
        if not isinstance(values, tuple | list) or len(values) != 5:
            raise self._wrong_form(f"{values!r:.80} from step")
        observation, reward, terminated, truncated, _ = values
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not is_bool_like(flag):
                raise ToolError(
                    f"{self} gave {flag!r:.80} as {name} from step. Return True or False."
                )
        return ToolResult(
            self.render_observation("step", environment, observation),
            reward=parse_reward(self, "step", reward),
            done=bool(terminated) or bool(truncated),
            metadata={TRUNCATED: True} if truncated and not terminated else {},
        )

    def reset(self, environment: Any, begins: Mapping[str, object]) -> str:
        """The first observation of an environment.

        Args:
            environment: A new environment.
            begins: The arguments of its `reset`.
        Raises:
            ToolError: If `reset` returns something else than Gymnasium's.
        """
        values = environment.reset(**begins)
        pair = isinstance(values, tuple | list) and len(values) == 2
        if not pair or not isinstance(values[1], Mapping):
            raise self._wrong_form(f"{values!r:.80} from reset")
        return self.render_observation("reset", environment, values[0])

    def _wrong_form(self, found: str) -> ToolError:
        return ToolError(
            f"{self} gave {found}. Gymnasium's form is 'reset(*, seed=None, options=None)', which "
            "gives an observation and a dict, and 'step(action)', which gives five values: "
            "observation, reward, terminated, truncated, info. Wrap an environment of the old form "
            "(package shimmy)."
        )


class GymEpisode(OwnEpisode[Gymnasium]):
    """An attempt in an environment of Gymnasium's form, which begins with the seed and the options
    of the question."""

    def __init__(self, world: Gymnasium, question: Question) -> None:
        super().__init__(world, question)
        self.begins: dict[str, object] = {"seed": question_seed(question)}
        if "options" in question.metadata:
            self.begins["options"] = copy.deepcopy(question.metadata["options"])

    async def enter(self) -> str:
        """Make the environment, and reset it."""
        return await self.do("reset", self._reset)

    def _reset(self) -> str:
        self.environment = self.world.make()
        return self.world.reset(self.environment, self.begins)

    async def act(self, call: ToolCall) -> ToolResult:
        action, environment = call.arguments["action"], self.environment
        step = functools.partial(self.world.take_step, environment, action)
        own = type(getattr(environment, "unwrapped", environment))
        values = await self.take("step", step, own)
        return await self.do("step", self.world.result, environment, values)


def _make_registered(id: str, **options: Any) -> object:
    """The environment that Gymnasium knows by an id."""
    try:
        import gymnasium
    except ImportError as error:
        raise RecipeError(
            "Gymnasium needs the package gymnasium, which is not installed. Run "
            "\"pip install '.[environments]'\" in your clone of turnrl."
        ) from error
    # its checker only warns about faults that are checked here
    return gymnasium.make(id, disable_env_checker=True, **options)


def _actions(
    name: str, space: Any, words: Sequence[str] | None
) -> tuple[Mapping[str, object], Callable[[Any], object]]:
    """JSON Schema of the actions of a space, and a function that makes an action from a JSON value.

    Raises:
        RecipeError: If the space has no such actions.
    """
    kind = type(space).__name__
    if kind == "Discrete":
        first, count = int(space.start), int(space.n)
        if words is None:
            return {"type": "integer", "minimum": first, "maximum": first + count - 1}, int
        if len({*words}) != count or len(words) != count:
            raise RecipeError(
                f"Gymnasium.actions names {len(words)} actions ({', '.join(words)}), and "
                f"{name} has {count}. Name each of them once, in their order."
            )
        numbers = {word: first + place for place, word in enumerate(words)}
        return {"type": "string", "enum": list(words)}, numbers.__getitem__
    if space is None or kind == "Text":
        if words is not None:
            return {"type": "string", "enum": list(words)}, str
        return {
            "type": "string",
            "maxLength": 1000 if space is None else int(space.max_length),
        }, str
    if words is not None:
        raise RecipeError(
            f"Gymnasium.actions names actions, and those of {name} are a {kind}. Leave it out."
        )
    if kind == "Box" and space.shape in ((), (1,)):
        low, high = float(space.low.min()), float(space.high.max())
        limits = {"minimum": low, "maximum": high}
        finite = {limit: value for limit, value in limits.items() if abs(value) < 1e30}

        def boxed(value: float) -> object:
            import numpy as np

            return np.full(space.shape, value, space.dtype)

        return {"type": "number", **finite}, boxed
    raise RecipeError(
        f"the actions of {name} are a {kind}, and a policy can give a text, a number or one of a "
        "list. Wrap it in an environment of such actions, and name a function that makes it in "
        "Gymnasium.make."
    )
