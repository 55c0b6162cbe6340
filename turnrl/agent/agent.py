"""An agent: a driver with a sampler and tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from turnrl import types
from turnrl.agent.attempt import Attempt, Rules
from turnrl.agent.chat import ChatFormat
from turnrl.agent.conversation import Conversation, MessageConversation, TokenConversation
from turnrl.agent.driver import Driver
from turnrl.agent.toolbox import Toolbox, ToolSessions


@final
class Agent:
    """Makes attempts, begins them, and moves them on.

    Args:
        driver: Drives the attempts.
        sampler: Writes the turns.
        chat: The policy's chat format.
        sampling: How to sample a turn.
        max_tokens: The most tokens in each history of an attempt.
        box: The tools.
    """

    def __init__(
        self,
        driver: Driver,
        sampler: types.Sampler,
        chat: ChatFormat,
        sampling: types.Sampling,
        max_tokens: int,
        box: Toolbox,
    ) -> None:
        self._driver, self._sampler, self._chat, self._box = driver, sampler, chat, box
        max_turns, tags = driver.plugin.max_turns, driver.plugin.tags
        self._rules = Rules(
            sampling, max_turns, max_tokens, self._converse, lambda text: chat.inert(text, tags)
        )

    def attempt(self, question: types.Question, seed: tuple[int, ...]) -> Attempt:
        """An attempt that has not begun."""
        return Attempt(self._rules, question, ToolSessions(self._box), seed)

    def begin(self, attempts: Sequence[Attempt]) -> None:
        """See `Driver.begin`."""
        self._driver.begin(attempts, self._chat)

    async def advance(self, attempt: Attempt) -> None:
        """See `Driver.advance`."""
        await self._driver.advance(attempt, self._chat, self._sampler)

    async def close(self) -> None:
        """Drop the tools' batches, and free what the sampler needs only while it samples."""
        self._box.close()
        if not isinstance(self._sampler, types.Engine) or self._sampler.keeps == 1:
            await self._sampler.drain()

    def _converse(
        self, messages: Sequence[types.Message], tools: Sequence[types.ToolSpec]
    ) -> Conversation:
        if isinstance(self._sampler, types.MessageSampler):
            return MessageConversation(self._sampler, self._chat, messages, tools)
        assert isinstance(self._sampler, types.Engine)
        prompt_ids = self._driver.encode(messages, tools, self._chat)
        session = self._sampler.open(prompt_ids)
        return TokenConversation(session, self._chat, messages, prompt_ids)
