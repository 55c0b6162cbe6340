"""Environments behind a server of OpenEnv: a session of the server for each attempt."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from turnrl import (
    DataError,
    PolicyMistake,
    Question,
    RecipeError,
    ToolCall,
    ToolError,
    ToolResult,
    ToolSpec,
)
from turnrl.agent.functions import inlined_schema
from turnrl.plugin.errors import TrajectoryLost, at_least, check_address, is_flag
from turnrl.plugin.hooks import named
from turnrl.plugin.patience import Patience
from turnrl_environments.client import Broken, Connection, Full, Refused, imported, schema_of
from turnrl_environments.world import Episode, World, missing, paid, seed_of, text_of

_MOST_TRIED = 64
"""The most sessions opened to find out how many a server holds."""
_QUICK_RETRIES = 2
_LOOK_EVERY_S = 0.25
"""Seconds before a full server is asked for a place again; later the pauses are longer."""

Observe = Callable[[Mapping[str, object]], str]


@final
class OpenEnv(World):
    """An environment behind a server of OpenEnv. Each attempt has a session of the server. The
    policy calls the tool `step` with the action that the server describes. While the server is
    away the run waits.

    Args:
        url: The server's address, such as `http://localhost:8000`.
        options: Arguments of every `reset`, such as `{difficulty: hard}`.
        columns: Additional columns of the question for `reset`, which always gets the `seed` of the
            question (`Seeds`).
        description: The tool's description for the policy; by default the server's description of
            the action.
        observe: Turns an observation, a dict, into a text: a function, or its path. By default the
            policy reads an observation of one text as it is, and any other as JSON.
        capacity: The most sessions that the server can hold at once. By default the run finds out
            by opening up to 64 for a moment.
        step_timeout_s: An attempt is lost and begins again if its environment takes longer than
            this many seconds for a turn or to begin.
        wait_s: Seconds that the run waits for a server that is away, or full.
    """

    def __init__(
        self,
        url: str,
        options: dict[str, Any] | None = None,
        columns: list[str] | None = None,
        description: str | None = None,
        observe: str | Observe | None = None,
        capacity: int | None = None,
        step_timeout_s: float = 60.0,
        wait_s: float = 300.0,
    ) -> None:
        check_address("OpenEnv.url", url, "http://localhost:8000")
        super().__init__(url, capacity, step_timeout_s)
        self.url = url.rstrip("/")
        self.options, self.columns = dict(options or {}), list(columns or ())
        self.description, self.wait_s = description, wait_s
        at_least(0, "OpenEnv.", self, "wait_s", optional=False)
        if wrong := _not_json(self.options):
            raise RecipeError(
                f"OpenEnv.options.{wrong}, which cannot be sent as JSON. Give a text, a number, a "
                "list or a mapping of them."
            )
        self.observe: Observe | None = None
        if observe is not None:
            self.observe = named("OpenEnv.observe", observe)
        # opening a session may wait for a server that is away, and then for a place
        self.timeout_s += 2 * (wait_s + (_QUICK_RETRIES + 2) * step_timeout_s)
        self._quick = Patience(str(self), 0.0, self._absent, _QUICK_RETRIES)
        self._patience = Patience(str(self), wait_s, self._away, _QUICK_RETRIES, setting="wait_s")
        self._counted = capacity is not None
        self._specs: Sequence[ToolSpec] = ()
        imported()

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The tool `step`, as the server describes its action. It is known after `start`."""
        return self._specs

    async def start(self) -> None:
        """Ask the server for its tool and for a session, and find out how many it holds.

        Raises:
            ToolError: If it is away.
        """
        self._specs = self._specs or (await self._described(),)
        await self._count()

    async def _described(self) -> ToolSpec:
        schemas = await asyncio.to_thread(
            self._quick.ask, lambda: schema_of(self.url, self.step_timeout_s)
        )
        action = schemas.get("action") if isinstance(schemas, Mapping) else None
        if not isinstance(action, Mapping) or "properties" not in action:
            raise ToolError(
                f"{self} has no page /schema with the properties of an action. Correct "
                "OpenEnv.url: the address of a server of OpenEnv."
            )
        description = self.description or action.get("description") or "Take one step."
        return ToolSpec("step", str(description), _parameters(action))

    async def _count(self) -> None:
        """Find out how many sessions the server holds, unless the number is known."""
        tried = 1 if self._counted else _MOST_TRIED
        connections: list[Connection] = []
        try:
            for number in (n for n in (1, 2, 4, 8, 16, 32, 64) if n <= tried):
                openings = (self._tried() for _ in range(number - len(connections)))
                results = await asyncio.gather(*openings, return_exceptions=True)
                connections += [result for result in results if isinstance(result, Connection)]
                for result in results:
                    if isinstance(result, Full):
                        if not self._counted:
                            self.capacity = result.most or max(len(connections), 1)
                        self._counted = True
                        return
                    if isinstance(result, BaseException):
                        raise result
            if not self._counted:
                self.capacity, self._counted = len(connections), True
        finally:
            await asyncio.gather(*(connection.close() for connection in connections))

    async def _tried(self) -> Connection:
        return await self._quick.ask_async(self._connected)

    async def _connected(self) -> Connection:
        try:
            return await Connection.opened(self.url, self.step_timeout_s)
        except Refused as refused:
            raise TrajectoryLost(
                f"{self} made no session: {refused}. See what the server printed."
            ) from None

    async def accepted(self) -> Connection:
        """A session of the server, once it has a place.

        Raises:
            ToolError: If the server is away for too long, or full.
            TrajectoryLost: If it cannot make an environment.
        """
        loop = asyncio.get_running_loop()
        until, pause_s = loop.time() + self.wait_s, _LOOK_EVERY_S
        while True:
            answer = await self._patience.ask_async(self._answer)
            if isinstance(answer, Connection):
                return answer
            if not isinstance(answer, Full):
                raise answer
            if loop.time() >= until:
                raise ToolError(
                    f"{self} had no place for {self.wait_s:g} s ({answer}). If others use it too, "
                    "set OpenEnv.capacity to the number of sessions that are left for this run, or "
                    "raise OpenEnv.wait_s."
                )
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 2.0)

    async def _answer(self) -> Connection | Full | TrajectoryLost:
        """The server's answer: a refusal is an answer too, because the server is not away."""
        try:
            return await self._connected()
        except (Full, TrajectoryLost) as refused:
            return refused

    def _absent(self, problem: str) -> ToolError:
        return ToolError(f"{self} {problem} Start the server, or correct OpenEnv.url.")

    def _away(self, problem: str) -> ToolError:
        return ToolError(
            f"{self} {problem} Start the server; then resume the run from its last checkpoint with "
            "--ckpt_path, or raise OpenEnv.wait_s to wait longer."
        )

    def episode(self, question: Question) -> Visit:
        """An attempt that has not begun.

        Raises:
            DataError: If the question lacks a column that `reset` gets, or JSON cannot hold one.
        """
        return Visit(self, question)

    def check_questions(self, questions: Sequence[Question]) -> None:
        for question in questions:
            self.begins(question)

    def begins(self, question: Question) -> dict[str, object]:
        """The arguments of `reset`.

        Raises:
            DataError: If the question lacks a column that `reset` gets, or JSON cannot hold one.
        """
        about = question.columns
        if lacks := [column for column in self.columns if column not in about]:
            raise missing(self, ", ".join(lacks), question)
        chosen = {column: about[column] for column in self.columns}
        begins = {"seed": seed_of(question), **self.options, **chosen}
        if wrong := _not_json(begins):
            raise DataError(
                f"{self} begins with the columns of question {question.id!r}, and {wrong}, which "
                "cannot be sent as JSON. Make it a text, a number, a list or a mapping in the data."
            )
        return begins


class Visit(Episode[OpenEnv]):
    """An attempt in a session of the server."""

    def __init__(self, world: OpenEnv, question: Question) -> None:
        super().__init__(world, question)
        self.begins = world.begins(question)
        self.connection: Connection | None = None

    async def enter(self) -> str:
        self.connection = await self.world.accepted()
        self.limit()  # waiting for a server does not count as the environment's time
        shown, _, self.over = await self._asked("reset", self.begins)
        return shown

    async def act(self, call: ToolCall) -> ToolResult:
        shown, reward, done = await self._asked("step", call.arguments)
        return ToolResult(shown, reward=reward, done=done)

    async def _asked(self, verb: str, data: Mapping[str, object]) -> tuple[str, float, bool]:
        """The text for the policy, the reward, and True if the attempt is over.

        Raises:
            PolicyMistake: If the server does not take the action.
            TrajectoryLost: If the server answers with another error, not at all, or too late.
            ToolError: If the answer breaks the contract.
        """
        assert self.connection is not None
        ask = functools.partial(self._answer, self.connection, verb, data)
        answer: dict[str, object] = await self.do(verb, ask)
        reward, done = answer.get("reward"), answer.get("done")
        if not isinstance(observation := answer.get("observation"), Mapping):
            raise ToolError(
                f"{self.world} answered to {verb} without an observation. Correct OpenEnv.url, or "
                "the server."
            )
        if not (done is None or is_flag(done)):
            raise ToolError(
                f"{self.world} gave {done!r:.80} as done from {verb}. It is true or false."
            )
        step, observe = f"observe, after {verb}", self.world.observe
        seen = await self.do(step, observe, observation) if observe else _shown(observation)
        shown = text_of(self.world, step, seen)
        return shown, 0.0 if reward is None else paid(self.world, verb, reward), bool(done)

    async def _answer(
        self, connection: Connection, verb: str, data: Mapping[str, object]
    ) -> dict[str, object]:
        try:
            return await connection.ask(verb, data)
        except Refused as refused:
            if verb == "step" and self._mistaken(refused, data):
                raise PolicyMistake(refused.message) from None
            advice = "See what the server printed."
            if refused.code == "SESSION_ERROR" and "ValueError" in refused.message:
                advice = (
                    "A validator of the action raised a ValueError, which OpenEnv's server cannot "
                    "send. Write what it checks into the types of the action."
                )
            raise TrajectoryLost(f"{self.world} answered to {verb}: {refused}. {advice}") from None
        except (Broken, Full) as broken:
            raise TrajectoryLost(
                f"{self.world} was lost in {verb}: {broken}. An attempt begins again at most "
                "model.rollout.max_restarts times; see whether the server still runs."
            ) from None

    def _mistaken(self, refused: Refused, data: Mapping[str, object]) -> bool:
        """True if the server refuses the action itself. It uses the same code for anything else
        that is not valid, such as an observation of the environment."""
        (spec,) = self.world.specs
        fields = {*spec.parameters["properties"], *data}
        return refused.code == "VALIDATION_ERROR" and fields.issuperset(refused.fields)

    async def leave(self) -> None:
        if self.connection is not None:
            await self.connection.close()


def _not_json(values: Mapping[str, object]) -> str:
    """The first value that JSON cannot hold, as `NAME is VALUE`; empty if there is none."""
    for name, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            return f"{name} is {value!r:.80}"
    return ""


def _shown(observation: Mapping[str, object]) -> str:
    """An observation as the policy reads it."""
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    if len(fields) == 1 and isinstance(only := next(iter(fields.values())), str):
        return only
    return json.dumps(fields, ensure_ascii=False)


def _parameters(action: Mapping[str, Any]) -> dict[str, object]:
    """JSON Schema of a call: the action's schema, without `metadata`, which a policy does not
    need."""
    required = [name for name in action.get("required", ()) if name != "metadata"]
    return inlined_schema(
        {
            "type": "object",
            "properties": {n: p for n, p in action["properties"].items() if n != "metadata"},
            **({"required": required} if required else {}),
            "additionalProperties": False,
            "$defs": action.get("$defs", {}),
        }
    )
