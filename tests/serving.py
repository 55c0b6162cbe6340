"""What the tests of engines behind servers share: fake servers, policies, turns whose
log-probabilities are compared with the learner's, and runs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

import turnrl_vllm.supply
from commands import RECIPE, save
from fake_server import FakeServer
from nursery import python
from turnrl import Policy, RecipeError, Sampling
from turnrl.agent.running import on_loop
from turnrl.engines import Completion, Engine, Session
from turnrl.plugin.errors import TrajectoryLost
from turnrl.policy.settings import Lora
from turnrl.runs import record
from turnrl_servers import ServerEngine, ServerSettings
from turnrl_sglang import SGLang
from turnrl_vllm import VLLM

PROMPT = [5, 9, 33, 71]
STARTER = "package://turnrl_atlas/starter"
"""The model that real servers serve."""
WINDOW = ("--max-model-len", "2048")
"""A fake server's option for the turns of a run."""
IGNORE_PEFT_WARNING = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
"""A warning of peft's, which a fake server's thread would raise as an error."""
VLLM_PYTHON = os.environ.get("TURNRL_TEST_VLLM_PYTHON")
"""The interpreter of an environment with vLLM."""
needs_vllm = pytest.mark.skipif(
    VLLM_PYTHON is None, reason="TURNRL_TEST_VLLM_PYTHON names no interpreter"
)
TURN = Sampling(6, 1.0)
"""A turn that nothing ends before its sixth token."""


@dataclass(frozen=True)
class Kind:
    """A kind of server.

    Args:
        software: Its name in messages.
        engine: The settings of the engine that samples with it.
        options: Options of the fake server.
        key_env: The environment variable with its key.
        spare_tokens: Tokens of its window that it needs for itself.
    """

    software: str
    engine: type[ServerSettings]
    options: tuple[str, ...]
    key_env: str
    spare_tokens: int

    def __str__(self) -> str:
        return self.software


VLLM_KIND = Kind("vLLM", VLLM, (), "VLLM_API_KEY", 0)
SGLANG_KIND = Kind("SGLang", SGLang, ("--sglang",), "SGLANG_API_KEY", 6)
both_kinds = pytest.mark.parametrize("kind", [VLLM_KIND, SGLANG_KIND], ids=str)


@contextlib.contextmanager
def fake_servers(default_model: Path, *always: str) -> Iterator[Callable[..., FakeServer]]:
    """Starts fake servers, which end with the block."""
    started: list[FakeServer] = []

    def start(*options: str, model: Path = default_model) -> FakeServer:
        started.append(FakeServer(model, *always, *options))
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture
def kind() -> Kind:
    """The kind of the fake servers and engines, unless a test or its module names another one."""
    return VLLM_KIND


@pytest.fixture
def start_server(kind: Kind, tiny_model: Path) -> Iterator[Callable[..., FakeServer]]:
    """Starts fake servers, which end with the test."""
    with fake_servers(tiny_model, *kind.options) as start:
        yield start


@pytest.fixture
def start_engine(kind: Kind) -> Iterator[Callable[..., ServerEngine]]:
    """Starts engines that sample with some fake servers, and closes them after the test."""
    engines: list[ServerEngine] = []

    def start(policy: Policy, *servers: FakeServer, **settings: Any) -> ServerEngine:
        urls = [server.url for server in servers]
        engine = kind.engine(url=urls, **{"patience_s": 20, **settings}).build()
        engines.append(engine)
        engine.start(policy, 64)
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def write_recipe(
    kind: Kind, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Writes `recipe.yaml`, with an engine of the kind, into a folder that is now the working
    directory."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(save_recipe, tiny_model, kind.engine.__name__)


# --------------------------------------------------------------------------------- policies


def trained_policy(model: str | Path, whole: bool = False) -> Policy:
    """A policy as after some steps of training.

    Args:
        model: Its base.
        whole: Whether all its weights have changed. Else it has an adapter that has an effect.
    """
    policy = Policy(str(model), lora=None if whole else Lora(r=4)).build()
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
    return policy.score_tokens(rows, temperature=1.0)[0].logprobs.tolist()


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


def converse_during(
    engine: ServerEngine, disturb: Callable[[], None] = lambda: None, turns_each: int = 3
) -> list[tuple[int, list[Completion]]]:
    """Six attempts of several turns, while something is done to the servers. An attempt that is
    lost begins again, as in a rollout. When exactly it happens is left to chance.

    Args:
        engine: A started engine.
        disturb: What is done, in a thread.
        turns_each: Turns of each attempt.
    Returns:
        Each attempt's number, and its turns.
    """

    async def converse(n: int, restarts: int = 2):
        session = engine.open([*PROMPT, n])
        try:
            done = [await turn(session)]
            for k in range(1, turns_each):
                await asyncio.sleep(0.05)
                done.append(await turn(session, [k]))
        except TrajectoryLost:
            if not restarts:
                raise
            return await converse(n, restarts - 1)
        session.close()
        return n, done

    async def scenario():
        disturbed = asyncio.get_running_loop().run_in_executor(None, disturb)
        conversations = await asyncio.gather(*(converse(n) for n in range(6)))
        await disturbed
        await engine.drain()
        return conversations

    return on_loop(scenario())


def check_conversations(
    policy: Policy, conversations: Sequence[tuple[int, Sequence[Completion]]], version: int
) -> None:
    """Every token of every turn has the learner's log-probability, after exactly its history."""
    for n, done in conversations:
        history = [*PROMPT, n]
        for k, completion in enumerate(done):
            history += [k] if k else []
            assert completion.version == version
            assert len(completion.token_ids) == TURN.max_tokens
            check_turn(policy, completion, history)
            history += completion.token_ids


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
    contents["data"]["questions_per_iteration"] = 2  # of four attempts
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


# ------------------------------------------------------------------------ a server of the run's own


@pytest.fixture
def interpreter(tmp_path, nursery, monkeypatch) -> Path:
    """An interpreter in whose environment `vllm` is the fake server, which starts fast."""
    monkeypatch.setattr(turnrl_vllm.supply, "_LOOK_EVERY_S", 0.05)
    package = tmp_path / "packages" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import fake_server\n"
        "_, model, *rest = sys.argv[1:]\n"
        "fake_server.main(['--model', model, '--api-key', os.environ['VLLM_API_KEY'], *rest])\n"
    )
    for name, value in nursery.environment.items():
        monkeypatch.setenv(name, value)
    forked = " ".join(python(str(package / "main.py")))
    file = tmp_path / "python"
    file.write_text(
        f'#!/bin/sh\nif [ "$1" = -m ]; then shift 2; exec {forked} "$@"; fi\n'
        f'PYTHONPATH={tmp_path / "packages"} exec {sys.executable} "$@"\n'
    )
    file.chmod(0o755)
    return file


def url_of(engine: VLLM) -> str:
    """The address of the server that an engine has started."""
    return engine.supply.url


def answer_of(engine: VLLM, path: str):
    """What the server that an engine has started answers."""
    headers = {"Authorization": f"Bearer {engine.supply.key}"}
    return httpx2.get(f"{url_of(engine)}/{path}", headers=headers).json()


def is_asleep(engine: VLLM) -> bool:
    """Whether the server that an engine has started sleeps."""
    return answer_of(engine, "is_sleeping")["is_sleeping"]


def sleeps_and_samples(engine: VLLM, policy: Policy) -> None:
    """It sleeps after each collection, and acts with the right weights after each wake."""
    engine.start(policy, 64)
    for version in range(3):
        engine.sync(version)
        for done in on_loop(turns([engine.open(PROMPT) for _ in range(4)])):
            assert done.version == version
            check_turn(policy, done, within=2e-3)
        assert not is_asleep(engine)
        engine.release_memory()
        assert is_asleep(engine)
        perturb(policy)
    assert engine.active_choices["memory between collections"] == "given back"
