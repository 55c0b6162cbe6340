"""A server of OpenEnv, with a lift in it: `python openenv_lift.py PORT SESSIONS`."""

import sys
import time
from typing import Literal

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field, field_validator


class Move(Action):
    """Move the lift."""

    go: Literal["up", "down", "crash", "hang", "blur"] = Field(description="Where to go.")
    floors: int = Field(default=1, ge=1, le=3)

    @field_validator("floors")
    @classmethod
    def one_by_one(cls, floors: int) -> int:
        if floors == 2:
            raise ValueError("never two at once")
        return floors


class Seen(Observation):
    """The floor."""

    text: str


class Lift(Environment):
    """Go up to a floor; each step costs 0.1, the floor pays 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, top=3, name="Lift"):
        if top < 0:
            raise ValueError("a lift without floors")
        self.floor, self.top, self.steps = 0, top, 0
        return Seen(text=f"{name} {seed} at 0 of {top}.")

    def step(self, action, timeout_s=None):
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
        return Seen(text=f"At {self.floor}.", reward=reward, done=there)

    @property
    def state(self):
        return State(episode_id=None, step_count=getattr(self, "steps", 0))


if __name__ == "__main__":
    port, sessions = map(int, sys.argv[1:3])
    app = create_fastapi_app(Lift, Move, Seen, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
