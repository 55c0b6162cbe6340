"""What the tests of engines behind servers share: stand-ins for the servers, policies, turns whose
log-probabilities are compared with the learner's, and runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import RECIPE, save
from nodes import free_port
from server_stand_in import Listener
from turnrl import Completion, Engine, Lora, Policy, RecipeError, Sampling, Session, record
from turnrl_servers import Server

PROMPT = [5, 9, 33, 71]
STARTER = "package://turnrl_atlas/starter"
"""The model that real servers serve."""
IGNORE_PEFT_WARNING = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
"""A warning of peft's, which a stand-in's thread would raise as an error."""
VLLM_PYTHON = os.environ.get("TURNRL_TEST_VLLM_PYTHON")
"""The interpreter of an environment with vLLM."""
needs_vllm = pytest.mark.skipif(
    VLLM_PYTHON is None, reason="TURNRL_TEST_VLLM_PYTHON names no interpreter"
)
TURN = Sampling(6, 1.0)
"""A turn that nothing ends before its sixth token."""


class StandIn:
    """A stand-in for a server, in a thread of this process: a process takes seconds to start."""

    def __init__(self, model: Path, *options: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._options = ["--model", str(model), *options, "--port", str(port)]
        self.start()

    def start(self, *options: str) -> None:
        """Start with a model that has no adapters and its own weights."""
        self.listener = Listener([*self._options, *options])
        threading.Thread(target=self.listener.serve_forever, args=(0.02,), daemon=True).start()

    def kill(self) -> None:
        self.listener.kill()

    def hang(self) -> None:
        """Accept connections, and answer nothing."""
        self.listener.answers.clear()

    def go_on(self) -> None:
        self.listener.answers.set()


@contextlib.contextmanager
def stand_ins(default_model: Path, *always: str) -> Iterator[Callable[..., StandIn]]:
    """Starts stand-ins, which end with the block."""
    started: list[StandIn] = []

    def start(*options: str, model: Path = default_model) -> StandIn:
        started.append(StandIn(model, *always, *options))
        return started[-1]

    yield start
    for stand_in in started:
        stand_in.kill()


def intercept(
    monkeypatch: pytest.MonkeyPatch,
    server: Server,
    on_answer: Callable[[str, Any], Awaitable[None]] | None = None,
) -> list[str]:
    """Note what an engine's server is asked from now on.

    Args:
        monkeypatch: Undoes it.
        server: One of `engine.pool.servers`.
        on_answer: Awaited with each path and answer. It may change the answer, or raise.
    Returns:
        The paths so far, also of health checks.
    """
    paths: list[str] = []
    connection = server.connection
    ask, is_well = connection.ask_async, connection.is_well

    async def noted_ask(path, body, within_s=None):
        paths.append(path)
        answer = await ask(path, body, within_s)
        if on_answer is not None:
            await on_answer(path, answer)
        return answer

    async def noted_health_check(within_s):
        paths.append("/health")
        return await is_well(within_s)

    monkeypatch.setattr(connection, "ask_async", noted_ask)
    monkeypatch.setattr(connection, "is_well", noted_health_check)
    return paths


# --------------------------------------------------------------------------------- policies


def trained_policy(model: str | Path, whole: bool = False) -> Policy:
    """A policy as after some steps of training.

    Args:
        model: Its base.
        whole: Whether all its weights have changed. Else it has an adapter that has an effect.
    """
    policy = Policy(str(model), lora=None if whole else Lora(r=4))
    perturb(policy)
    return policy


def perturb(policy: Policy, size: float = 0.1) -> None:
    """Change the weights, as a step of training would."""
    policy.load()
    with torch.no_grad():
        for name, weight in policy.network.named_parameters():
            if policy.lora is None or "lora_B" in name:
                weight.add_(torch.randn_like(weight) * size * (1 if policy.lora else 0.1))


# ------------------------------------------------------------------------------------ turns


async def turn(session: Session, new: Sequence[int] = (), sampling: Sampling = TURN) -> Completion:
    return await session.generate(list(new), sampling)


async def turns(sessions: Sequence[Session]) -> list[Completion]:
    """A turn of each session, at the same time."""
    return await asyncio.gather(*(turn(session) for session in sessions))


def learner_logprobs(policy: Policy, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """The learner's log-probabilities of sampled tokens."""
    rows = [([*prompt, *tokens], [False] * len(prompt) + [True] * len(tokens))]
    return policy.read(rows, temperature=1.0)[0].logprobs.tolist()


def check_turn(
    policy: Policy, done: Completion, history: Sequence[int] = PROMPT, within: float = 1e-4
) -> None:
    """A turn was sampled with the learner's weights, after exactly this history."""
    wanted = learner_logprobs(policy, history, done.token_ids)
    assert done.logprobs == pytest.approx(wanted, abs=within)


def refusal(engine: Engine, policy: Policy, max_tokens: int = 64) -> str:
    """The message with which an engine refuses a policy."""
    with pytest.raises(RecipeError) as error:
        engine.check(policy, max_tokens)
    return str(error.value)


# ------------------------------------------------------------------------------------- runs


def save_recipe(model: Path, engine: str, whole: bool = False, **settings: object) -> None:
    """Write `recipe.yaml`, with an engine of this class, into the working directory.

    Args:
        model: The model that it trains.
        engine: The class.
        whole: Whether it trains all weights. Else it trains an adapter.
        settings: Of the engine.
    """
    contents = json.loads(json.dumps(RECIPE).replace("MODEL", str(model)))
    contents["model"]["policy"]["lora"] = None if whole else {"r": 4}
    contents["model"]["engine"] = {"class_path": engine, "init_args": settings}
    contents["record"] = {"tokens": True}
    save(contents)


def trained_rows() -> list[dict]:
    """What the run of `recipe.yaml` has recorded of its training."""
    rows = record.read("runs/recipe/version_0")
    return [row for row in rows if row["split"] == "train"]


def sampled_tokens(row: dict) -> list[tuple[int, float, float]]:
    """The version, the sampler's and the learner's log-probability of each sampled token."""
    columns = ("versions", "sampler_logprobs", "learner_logprobs")
    tokens = zip(*(row[name] for name in columns), strict=True)
    sampled = [token for token in tokens if token[0] is not None]
    assert len(sampled) == sum(turn >= 0 for turn in row["turn_index"]) > 0
    return sampled


def check_record(attempts: int) -> None:
    """Each recorded token has the learner's log-probability, and the version of its attempt."""
    rows = trained_rows()
    assert len(rows) == attempts
    assert {row["policy_version"] for row in rows} == {0, 2}  # an iteration has two steps
    for row in rows:
        for version, sampler, learner in sampled_tokens(row):
            assert version == row["policy_version"]
            assert sampler == pytest.approx(learner, abs=1e-4)
