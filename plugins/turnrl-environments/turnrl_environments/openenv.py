"""Environments behind a server of OpenEnv: a session of the server for each attempt."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from turnrl import (
    PolicyMistake,
    Question,
    ToolCall,
    ToolError,
    ToolResult,
    ToolSpec,
)
from turnrl.agent.functions import inline_schema
from turnrl.plugin.errors import TrajectoryLost, check_address, check_at_least, is_bool_like
from turnrl.plugin.hooks import import_object
from turnrl.plugin.patience import Patience
from turnrl_environments.client import (
    Connection,
    ConnectionBroken,
    RequestRefused,
    fetch_schema,
    import_websockets,
)
from turnrl_environments.world import (
    Episode,
    World,
    check_text,
    missing_columns_error,
    parse_reward,
    question_seed,
)

_QUICK_RETRIES = 2

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
        capacity: The most sessions that the run opens at once: as many as the server holds
            (`max_concurrent_envs`, which is 1 by default there too), less those of others.
        step_timeout_s: An attempt is lost and begins again if its environment takes longer than
            this many seconds for a call.
        wait_s: Seconds that the run waits for a server that is away, or full.
    """

    def __init__(
        self,
        url: str,
        options: dict[str, Any] | None = None,
        columns: list[str] | None = None,
        description: str | None = None,
        observe: str | Observe | None = None,
        capacity: int = 1,
        step_timeout_s: float = 60.0,
        wait_s: float = 300.0,
    ) -> None:
        check_address("OpenEnv.url", url, "http://localhost:8000")
        super().__init__(url, capacity, step_timeout_s)
        self.url = url.rstrip("/")
        self.options, self.columns = dict(options or {}), list(columns or ())
        self.description, self.wait_s = description, wait_s
        check_at_least(0, "OpenEnv.", self, "wait_s", optional=False)
        self.observe: Observe | None = None
        if observe is not None:
            self.observe = import_object("OpenEnv.observe", observe)
        self._quick = Patience(str(self), 0.0, self._away_error, _QUICK_RETRIES)
        self._patience = Patience(
            str(self), wait_s, self._away_error, _QUICK_RETRIES, setting="wait_s"
        )
        self._specs: Sequence[ToolSpec] = ()
        import_websockets()

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The tool `step`, as the server describes its action. It is known after `start`."""
        return self._specs

    async def start(self) -> None:
        """Ask the server for its tool, and for a session.

        Raises:
            ToolError: If it is away, or full.
        """
        self._specs = self._specs or (await self._describe_tool(),)
        connection = await self._quick.ask_async(self._connect)
        await connection.close()

    async def _describe_tool(self) -> ToolSpec:
        schemas = await asyncio.to_thread(
            self._quick.ask, lambda: fetch_schema(self.url, self.step_timeout_s)
        )
        action = schemas.get("action") if isinstance(schemas, Mapping) else None
        if not isinstance(action, Mapping) or "properties" not in action:
            raise ToolError(
                f"{self} has no page /schema with the properties of an action. Correct "
                "OpenEnv.url: the address of a server of OpenEnv."
            )
        description = self.description or action.get("description") or "Take one step."
        return ToolSpec("step", str(description), _parameters(action))

    async def _connect(self) -> Connection:
        try:
            return await Connection.open(self.url, self.step_timeout_s)
        except RequestRefused as refused:
            raise TrajectoryLost(
                f"{self} made no session: {refused}. See what the server printed."
            ) from None

    async def acquire_session(self) -> Connection:
        """A session of the server, once it has a place.

        Raises:
            ToolError: If the server is away for too long, or full.
            TrajectoryLost: If it cannot make an environment.
        """
        answer = await self._patience.ask_async(self._answer)
        if isinstance(answer, TrajectoryLost):
            raise answer
        return answer

    async def _answer(self) -> Connection | TrajectoryLost:
        """The server's answer: a refusal is an answer too, because the server is not away."""
        try:
            return await self._connect()
        except TrajectoryLost as refused:
            return refused

    def _away_error(self, problem: str) -> ToolError:
        return ToolError(
            f"{self} {problem} Start the server, or correct OpenEnv.url. If it is full, lower "
            "OpenEnv.capacity to the number of sessions that others leave. A run resumes from its "
            "last checkpoint with --ckpt_path, and waits longer with a higher OpenEnv.wait_s."
        )

    def episode(self, question: Question) -> OpenEnvEpisode:
        """An attempt that has not begun.

        Raises:
            DataError: If the question lacks a column that `reset` gets.
        """
        return OpenEnvEpisode(self, question)

    def check_questions(self, questions: Sequence[Question]) -> None:
        for question in questions:
            self.begins(question)

    def begins(self, question: Question) -> dict[str, object]:
        """The arguments of `reset`.

        Raises:
            DataError: If the question lacks a column that `reset` gets.
        """
        about = question.columns
        if lacks := [column for column in self.columns if column not in about]:
            raise missing_columns_error(self, ", ".join(lacks), question)
        chosen = {column: about[column] for column in self.columns}
        return {"seed": question_seed(question), **self.options, **chosen}


class OpenEnvEpisode(Episode[OpenEnv]):
    """An attempt in a session of the server."""

    def __init__(self, world: OpenEnv, question: Question) -> None:
        super().__init__(world, question)
        self.begins = world.begins(question)
        self.connection: Connection | None = None

    async def enter(self) -> str:
        self.connection = await self.world.acquire_session()
        shown, _, self.over = await self._ask("reset", self.begins)
        return shown

    async def act(self, call: ToolCall) -> ToolResult:
        shown, reward, done = await self._ask("step", call.arguments)
        return ToolResult(shown, reward=reward, done=done)

    async def _ask(self, verb: str, data: Mapping[str, object]) -> tuple[str, float, bool]:
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
        if not (done is None or is_bool_like(done)):
            raise ToolError(
                f"{self.world} gave {done!r:.80} as done from {verb}. It is true or false."
            )
        step, observe = f"observe, after {verb}", self.world.observe
        seen = (
            await self.do(step, observe, observation)
            if observe
            else _render_observation(observation)
        )
        shown = check_text(self.world, step, seen)
        return shown, 0.0 if reward is None else parse_reward(self.world, verb, reward), bool(done)

    async def _answer(
        self, connection: Connection, verb: str, data: Mapping[str, object]
    ) -> dict[str, object]:
        try:
            return await connection.ask(verb, data)
        except RequestRefused as refused:
            if verb == "step" and self._is_mistake(refused, data):
                raise PolicyMistake(refused.message) from None
            raise TrajectoryLost(
                f"{self.world} answered to {verb}: {refused}. See what the server printed. It ends "
                "a session if a validator of the action raises a ValueError, which it cannot send: "
                "write such a rule into the types of the action."
            ) from None
        except ConnectionBroken as broken:
            raise TrajectoryLost(
                f"{self.world} was lost in {verb}: {broken}. An attempt begins again at most "
                "model.rollout.max_restarts times; see whether the server still runs."
            ) from None

    def _is_mistake(self, refused: RequestRefused, data: Mapping[str, object]) -> bool:
        """True if the server refuses the action itself. It uses the same code for anything else
        that is not valid, such as an observation of the environment."""
        (spec,) = self.world.specs
        fields = {*spec.parameters["properties"], *data}
        return refused.code == "VALIDATION_ERROR" and fields.issuperset(refused.fields)

    async def leave(self) -> None:
        if self.connection is not None:
            await self.connection.close()


def _render_observation(observation: Mapping[str, object]) -> str:
    """An observation as the policy reads it."""
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    if len(fields) == 1 and isinstance(only := next(iter(fields.values())), str):
        return only
    return json.dumps(fields, ensure_ascii=False)


def _parameters(action: Mapping[str, Any]) -> dict[str, object]:
    """JSON Schema of a call: the action's schema, without `metadata`, which a policy does not
    need."""
    required = [name for name in action.get("required", ()) if name != "metadata"]
    return inline_schema(
        {
            "type": "object",
            "properties": {n: p for n, p in action["properties"].items() if n != "metadata"},
            **({"required": required} if required else {}),
            "additionalProperties": False,
            "$defs": action.get("$defs", {}),
        }
    )
