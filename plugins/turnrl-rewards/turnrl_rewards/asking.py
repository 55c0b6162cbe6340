"""Asking a judge: many requests at once, and the verdicts in their replies.

An outage never becomes a verdict. Either the request is sent again, or a `RewardError` stops the
run (`turnrl_openai.connection`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from turnrl.agent.running import on_loop
from turnrl.plugin.errors import RewardError
from turnrl_openai.connection import Connection
from turnrl_openai.reply import read_completion
from turnrl_rewards.server import JudgeServer

if TYPE_CHECKING:
    from httpx2 import Response


def ask_all(
    server: JudgeServer,
    prompts: Mapping[str, str],
    read: Callable[[str], float | None],
    keep: Callable[[str, float], None],
) -> None:
    """Send prompts to a judge, `server.concurrency` at a time.

    Args:
        server: The judge's server.
        prompts: The prompts, by key.
        read: Reads the verdict in a reply; None if there is none.
        keep: Called in another thread with the key and the verdict of each prompt, as they come.
    Raises:
        RewardError: If the server stays away, refuses, or twice gives no verdict. Earlier verdicts
            have been passed to `keep` by then.
    """
    judge = Connection(
        server,
        f"the judge {server.model!r} at {server.base_url}",
        RewardError,
        "Correct model, max_tokens or extra.",
    )
    todo = iter(prompts.items())

    async def lane() -> None:
        for key, prompt in todo:  # all lanes take the next prompt from one iterator
            keep(key, await _verdict(judge, server.body(prompt), read))

    async def work() -> None:
        lanes = [asyncio.create_task(lane()) for _ in range(min(server.concurrency, len(prompts)))]
        try:
            await asyncio.gather(*lanes)
        finally:
            for task in lanes:
                task.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
            await judge.close()

    on_loop(work())


async def _verdict(
    judge: Connection, body: Mapping[str, object], read: Callable[[str], float | None]
) -> float:
    """The judge's verdict on a prompt. If the reply has none, the judge is asked a second time."""
    sent = b""

    async def reply(response: Response) -> object:
        nonlocal sent
        sent = await judge.read_body(response)
        return judge.parse(sent)

    for _ in range(2):
        with contextlib.suppress(ValueError):  # no completion, so no verdict
            if (score := read(read_completion(await judge.ask(body, reply)).text)) is not None:
                return score
    shown = judge.clean(sent.decode(errors="replace"))
    raise judge.make_error(
        f"was asked twice and gave no verdict; it sent {shown!r}. Ask in 'prompt' for one score as "
        "JSON ({\"score\": 0.5}), raise 'max_tokens' if the reply is cut, or take another model."
    )
