"""Quickstart's world: what an engine samples in a second, what lockstep costs, and whether a
trajectory costs the same among many. The policy is the starter of Atlas."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import random
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

from turnrl_atlas import Atlas
from turnrl_slots import Slots
from turnrl_two_turn import TwoTurn

from turnrl import MTGRPO, Engine, Policy, RecipeError, Rollout, Sampling, ToolResult
from turnrl_bench.measure import Clock, Found, Peak
from turnrl_bench.ours import AnswerHash, SlowSearch, sampled_tokens

STARTER = "package://turnrl_atlas/starter"
CLIENTS = 64


# ---------------------------------------------------------------------------------- engines


def slots(sizes: Sequence[int], rounds: int, warm_up: int) -> Found:
    """Rounds of requests to the engine Slots.

    Args:
        sizes: Prompts, requests that share each, tokens of a prompt, tokens sampled.
        rounds: That are kept.
        warm_up: Rounds before them.
    """
    prompts, group, length, sampled = sizes
    policy, engine = Policy(STARTER), Slots()
    policy.load()
    engine.start(policy, length + sampled)
    clock, tokens = Clock(), 0
    for n in range(warm_up + rounds):
        asked = drawn(len(policy.tokenizer), prompts, length, n)
        engine.sync(n)
        began = Clock.now()
        tokens = asyncio.run(_sample(engine, asked, group, sampled))
        if n >= warm_up:
            clock.keep("sampling", began, Clock.now())
    engine.close()
    return {"times": clock.times, "sampled": tokens}


async def _sample(engine: Engine, prompts: Sequence[Sequence[int]], group: int, most: int) -> int:
    """All trajectories of all prompts at once; how many tokens came of it."""
    sessions = []
    for prompt in prompts:
        with contextlib.closing(engine.open(prompt)) as root:
            sessions += [root.fork() for _ in range(group)]
    numbered = enumerate(sessions)
    said = await asyncio.gather(
        *(s.generate((), Sampling(max_tokens=most, seed=n)) for n, s in numbered)
    )
    for session in sessions:
        session.close()
    await engine.drain()
    return sum(len(one.token_ids) for one in said)


def drawn(vocabulary: int, count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens, other ones for each seed, so that no cache knows them."""
    draw = random.Random(seed)
    return [[draw.randrange(8, vocabulary) for _ in range(length)] for _ in range(count)]


def served(url: str, sizes: Sequence[int], rounds: int, warm_up: int) -> Found:
    """The same rounds of requests to a server, from as many clients as `CLIENTS`.

    Args:
        url: Address of an OpenAI-compatible server that takes token ids.
        sizes: See `slots`.
        rounds: See `slots`.
        warm_up: See `slots`.
    """
    prompts, group, length, sampled = sizes
    model = served_model(url)
    vocabulary = len(Policy(STARTER).tokenizer)
    clock, tokens = Clock(), 0
    # a fresh process would otherwise ask for the prompts of the block before, which a cache knows
    seeds = itertools.count(random.SystemRandom().randrange(2**32))
    options = {
        "model": model,
        "max_tokens": sampled,
        "temperature": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 0,
    }

    def ask(prompt: list[int]) -> int:
        said = _answer(url, "/v1/completions", {**options, "prompt": prompt})
        return len(said["choices"][0]["token_ids"])

    with ThreadPoolExecutor(CLIENTS) as pool:
        for n in range(warm_up + rounds):
            asked = drawn(vocabulary, prompts, length, next(seeds))
            began = Clock.now()
            tokens = sum(pool.map(ask, [p for p in asked for _ in range(group)]))
            if n >= warm_up:
                clock.keep("sampling", began, Clock.now())
    return {"times": clock.times, "sampled": tokens, "model": model}


def served_model(url: str) -> str:
    """The name of the model that a server has.

    Raises:
        RecipeError: If there is no such server.
    """
    try:
        return str(_answer(url, "/v1/models")["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        why = str(error) or type(error).__name__
        raise RecipeError(
            f"no vLLM server answers at --url {url!r}: {why}. Start one (vllm serve MODEL --port "
            "8123) and give its address, which begins with http:// (http://127.0.0.1:8123 say)."
        ) from error


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _answer(url: str, path: str, contents: dict[str, Any] | None = None) -> Any:
    """The JSON that a server answers, without a proxy in between.

    Raises:
        ValueError: If that is no address, or it answers with an error or something else.
        OSError: If it does not answer.
    """
    body = None if contents is None else json.dumps(contents).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url.rstrip("/") + path, body, headers)
    try:
        with _DIRECT.open(request, timeout=300) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise ValueError(f"the server answered {error.code}: {error.read()[:300]!r}") from None


# ------------------------------------------------------------------------------------ tools


@final
class Pages(SlowSearch):
    """Finds the page of the place that a query ends with."""

    name, description = "search", "Looks a place up."
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}

    def __init__(self) -> None:
        super().__init__()
        self.pages = {page.title: page.text for page in Atlas().passages()}

    def find(self, query: str) -> ToolResult:
        page = self.pages.get(query.rpartition(" of ")[2])
        return ToolResult(page or "no such place", ok=page is not None)


def _module(tool: Pages, lockstep: bool = True, **engine: Any) -> MTGRPO:
    """Quickstart's agent."""
    rollout = Rollout(
        TwoTurn("Tools: [search(query)]"),
        [tool],
        max_turn_tokens=64,
        max_result_tokens=96,
        max_tokens=384,
        lockstep=lockstep,
    )
    return MTGRPO(Policy(STARTER), rollout, [AnswerHash()], engine=Slots(**engine))


def tools(
    delays: Sequence[Sequence[Any]], lockstep: bool, questions: int, group: int, rounds: int
) -> Found:
    """Collections with tools that take their time.

    Args:
        delays: For each tool its name here, its milliseconds, whether each call has its own.
        lockstep: See `Rollout`.
        questions: Questions in each collection.
        group: Trajectories of each.
        rounds: Collections with each tool.
    """
    asked = list(itertools.islice(Atlas().questions("train"), questions))
    clock, sampled, tool = Clock(), 0, Pages()
    module = _module(tool, lockstep)
    module.ask(asked, group)
    for name, ms, jitter in delays:
        tool.ms, tool.jitter = ms, jitter
        for n in range(rounds):
            began = Clock.now()
            played = module.ask(asked, group, seed=n)
            clock.keep(name, began, Clock.now())
            sampled += sampled_tokens(played)
    return {"times": clock.times, "sampled": sampled}


def scale(trajectories: int, group: int, engine: dict[str, Any]) -> Found:
    """A collection of many trajectories.

    Args:
        trajectories: Trajectories of the collection; a multiple of `group`.
        group: Trajectories of each question.
        engine: Options of Slots.
    """
    every = list(itertools.islice(Atlas().questions("train"), trajectories // group))
    clock, module = Clock(), _module(Pages(), **engine)
    module.ask(every[:1], group)
    peak, began = Peak(), Clock.now()
    played = module.ask(every, group)
    clock.keep("collection", began, Clock.now())
    return {
        "times": clock.times,
        "peaks": [peak.bytes],
        "sampled": sampled_tokens(played),
        "trajectories": len(played),
    }
