"""An agent: the model, the tools and the limits that all attempts of a collection share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from turnrl.agent.chat import ChatFormat
from turnrl.agent.conversation import Conversation, MessageConversation, TokenConversation
from turnrl.agent.toolbox import Toolbox, ToolSessions
from turnrl.plugin.errors import PluginError
from turnrl.types import (
    Engine,
    Message,
    MessageSampler,
    Player,
    Sampler,
    Sampling,
    Segmenter,
    ToolSpec,
)


class Agent(ABC):
    """What an attempt acts with.

    Attributes:
        sampling: How to sample a turn; its `max_tokens` limits one turn.
        max_turns: The most turns of an attempt.
        max_tokens: The most tokens in each history of an attempt.
        box: The tools.
    """

    sampling: Sampling
    max_turns: int
    max_tokens: int
    box: Toolbox

    def sessions(self) -> ToolSessions:
        """Sessions at the tools for one attempt, which are not open yet."""
        return ToolSessions(self.box)

    @abstractmethod
    def converse(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Conversation:
        """Open a history.

        Args:
            messages: Its first messages.
            tools: The tools that the chat template has to describe.
        """

    @abstractmethod
    def neutralize(self, text: str) -> str:
        """Neutralise tags and control tokens in a text that a player reads."""


@final
@dataclass(eq=False)
class SampledAgent(Agent):
    """An agent whose turns a sampler writes.

    Args:
        plugin: The segmenter or the player.
        sampler: Writes the turns.
        chat: The policy's chat format.
        sampling: See `Agent`.
        max_tokens: See `Agent`.
        box: See `Agent`.
    """

    plugin: Segmenter | Player
    sampler: Sampler
    chat: ChatFormat
    sampling: Sampling
    max_tokens: int
    box: Toolbox

    def __post_init__(self) -> None:
        self.max_turns = self.plugin.max_turns

    def converse(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Conversation:
        """See `Agent.converse`.

        Raises:
            PluginError: If a player's chat template does not describe its tools.
        """
        if isinstance(self.sampler, MessageSampler):
            return MessageConversation(self.sampler, self.chat, messages, tools)
        assert isinstance(self.sampler, Engine)
        prompt_ids = self.chat.encode_prompt(messages, tools)
        # before a player opens a history, nobody knows whether it leaves tools to the template
        left = tools if isinstance(self.plugin, Player) else ()
        if left and prompt_ids == self.chat.encode_prompt(messages):
            raise PluginError(
                f"the player {type(self.plugin).__name__} leaves it to the chat template to "
                "describe the tools, and the policy's does not. "
                f"{self.chat.advice('describes them')}"
            )
        return TokenConversation(
            self.sampler.open(prompt_ids), self.chat, messages, tools, prompt_ids
        )

    def neutralize(self, text: str) -> str:
        """See `Agent.neutralize`."""
        return self.chat.neutralize(text, self.plugin.tags)

    async def close(self) -> None:
        """Drop the tools' batches, and free what the sampler needs only while it samples."""
        self.box.close()
        if not isinstance(self.sampler, Engine) or self.sampler.keeps == 1:
            await self.sampler.drain()
