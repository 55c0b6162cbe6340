"""What OpenEnv's server says, in a server of its own: `python lift_server.py PORT SESSIONS`.

Its answers were compared word for word with those of openenv 0.10, whose packages do not go
together with turnrl's.
"""

import asyncio
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import to_json
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed


class Action(BaseModel):
    """Move the lift."""

    model_config = ConfigDict(extra="forbid", title="Move")
    metadata: dict[str, Any] = Field(
        default_factory=dict, description="Additional metadata for the action"
    )
    go: Literal["up", "down", "crash", "hang", "blur"] = Field(description="Where to go.")
    floors: int = Field(default=1, ge=1, le=3)

    @field_validator("floors")
    @classmethod
    def one_by_one(cls, floors: int) -> int:
        if floors == 2:
            raise ValueError("never two at once")
        return floors


class Step(BaseModel):
    type: Literal["step"] = "step"
    data: dict[str, Any]


class Seen(BaseModel):
    text: str


class Lift:
    steps = 0

    def reset(self, seed=None, episode_id=None, top=3, name="Lift"):
        if top < 0:
            raise ValueError("a lift without floors")
        self.floor, self.top, self.steps = 0, top, 0
        return f"{name} {seed} at 0 of {top}.", None, False

    def step(self, action):
        self.steps += 1
        if action.go == "crash":
            raise RuntimeError("the rope")
        if action.go == "hang":
            time.sleep(1.5)
        if action.go == "blur":
            Seen(text=None)
        self.floor += action.floors if action.go == "up" else -action.floors
        there = self.floor >= self.top
        reward = 1.0 if there else None if action.go == "down" else -0.1
        return f"At {self.floor}.", reward, there


def error(code, message, **more):
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def observed(text, reward, done):
    seen = {"observation": {"metadata": {}, "text": text}, "reward": reward, "done": done}
    return {"type": "observation", "data": seen}


async def answer(lift, worker, message):
    """What a message is answered with; None ends the session."""
    run, known = asyncio.get_running_loop().run_in_executor, ("seed", "episode_id", "top", "name")
    match message.get("type", ""):
        case "reset":
            taken = {k: v for k, v in message.get("data", {}).items() if k in known}
            return observed(*await run(worker, lambda: lift.reset(**taken)))
        case "step":
            action = Action.model_validate(Step(**message).data)
            return observed(*await run(worker, lift.step, action))
        case "state":
            return {"type": "state", "data": {"episode_id": None, "step_count": lift.steps}}
        case "close":
            return None
        case other:
            return error("UNKNOWN_TYPE", f"Unknown message type: {other}")


class Server:
    def __init__(self, sessions):
        self.most, self.active = sessions, 0

    async def page(self, connection, request):
        if request.path == "/schema":
            response = connection.respond(
                HTTPStatus.OK, json.dumps({"action": Action.model_json_schema()})
            )
            response.headers["Content-Type"] = "application/json"
            return response
        return None if request.path == "/ws" else connection.respond(HTTPStatus.NOT_FOUND, "")

    async def session(self, socket):
        if self.active >= self.most:
            message = f"Server at capacity: {self.active}/{self.most} sessions active."
            full = error(
                "CAPACITY_REACHED",
                f"{message} Cannot accept new connections.",
                active_sessions=self.active,
                max_sessions=self.most,
            )
            return await socket.send(json.dumps(full))
        self.active += 1
        try:
            await self.talk(socket, Lift(), ThreadPoolExecutor(1))
        except ConnectionClosed:
            return None
        finally:
            self.active -= 1

    async def talk(self, socket, lift, worker):
        async for text in socket:
            try:
                reply = await answer(lift, worker, json.loads(text))
            except json.JSONDecodeError as fault:
                reply = error("INVALID_JSON", f"Invalid JSON: {fault}")
            except ValidationError as fault:
                reply = error("VALIDATION_ERROR", "Invalid message", errors=fault.errors())
            except Exception as fault:
                reply = error("EXECUTION_ERROR", str(fault))
            if reply is None:
                return
            try:
                sent = to_json(reply).decode()
            except Exception as fault:  # it cannot send the exception of a validator
                await socket.send(json.dumps(error("SESSION_ERROR", str(fault))))
                return
            await socket.send(sent)


async def main(port, sessions):
    server = Server(sessions)
    async with serve(server.session, "127.0.0.1", port, process_request=server.page):
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:3])))
