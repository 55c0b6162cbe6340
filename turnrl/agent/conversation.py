"""Conversations: one trajectory's history at an engine, or at a sampler of messages.

Both take messages and return turns, so that the loop above does not know the difference. An engine
is given token ids, rendered once and appended. A sampler of messages is given the messages, and the
limits of a rollout are counted in the policy's tokens all the same.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from turnrl.agent.chat import ChatFormat, tool_schema
from turnrl.types import Message, MessageSampler, Reading, Sampling, Session, ToolSpec, Turn

_TOOLS = "\n\n# Tools\n\nYou can call these functions:\n<tools>\n{}\n</tools>"


class Conversation(ABC):
    """One trajectory's history at what samples it.

    Attributes:
        prompt_ids: Token ids of the prompt; None where messages are sampled.
        tokens: Its length so far, in the policy's tokens.
    """

    prompt_ids: tuple[int, ...] | None = None
    tokens: int

    @abstractmethod
    async def say(self, sampling: Sampling) -> Turn:
        """Sample the next turn; nothing is read in it yet."""

    @abstractmethod
    def tell(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Append messages, for the next turn to answer.

        Returns:
            Their token ids, chat markup included; none where messages are sampled.
        """

    @abstractmethod
    def fork(self) -> Conversation:
        """A copy that goes its own way from here."""

    @abstractmethod
    def close(self) -> None:
        """Free what the sampler holds for it."""


@final
class TokenConversation(Conversation):
    """A session of an engine.

    Args:
        session: Its history is the prompt.
        chat: The policy's chat format.
        prompt_ids: The prompt.
    """

    def __init__(self, session: Session, chat: ChatFormat, prompt_ids: tuple[int, ...]) -> None:
        self.session, self._chat, self.prompt_ids = session, chat, prompt_ids
        self.tokens = len(prompt_ids)
        self._new_ids: tuple[int, ...] = ()
        self._last: int | None = None

    async def say(self, sampling: Sampling) -> Turn:
        sampling = replace(sampling, end_ids=self._chat.end_ids)
        done = await self.session.generate(self._new_ids, sampling)
        self.tokens += len(done.token_ids)
        self._last = done.token_ids[-1] if done.token_ids else None
        text, cut = self._chat.text(done.token_ids), done.reason == "length"
        ids, version = done.token_ids, done.version
        return Turn(text, ids, done.logprobs, Reading(), cut=cut, version=version)

    def tell(self, messages: Sequence[Message]) -> tuple[int, ...]:
        self._new_ids = self._chat.observation(messages, self._last)
        self.tokens += len(self._new_ids)
        return self._new_ids

    def fork(self) -> Conversation:
        branch = copy.copy(self)
        branch.session = self.session.fork()
        return branch

    def close(self) -> None:
        self.session.close()


@final
class MessageConversation(Conversation):
    """Messages, sent as a whole for each turn.

    Args:
        sampler: Who answers.
        chat: The policy's chat format, which tokens are counted in.
        messages: The prompt.
        specs: Tools that a chat template would describe; the system message describes them here.
    """

    def __init__(
        self,
        sampler: MessageSampler,
        chat: ChatFormat,
        messages: Sequence[Message],
        specs: Sequence[ToolSpec],
    ) -> None:
        self._sampler, self._chat, self._messages = sampler, chat, [*messages]
        self.tokens = len(chat.prompt(messages, specs))
        if specs:
            system: Message = {"role": "system", "content": ""}
            if messages[0]["role"] == "system":
                system = self._messages.pop(0)
            schemas = "\n".join(json.dumps(tool_schema(spec), default=dict) for spec in specs)
            content = (system["content"] + _TOOLS.format(schemas)).strip()
            self._messages.insert(0, {"role": "system", "content": content})

    async def say(self, sampling: Sampling) -> Turn:
        reply = await self._sampler.reply(tuple(self._messages), sampling)
        self._messages.append({"role": "assistant", "content": reply.text})
        self.tokens += self._chat.count(reply.text)
        return Turn(reply.text, (), (), Reading(), cut=reply.cut)

    def tell(self, messages: Sequence[Message]) -> tuple[int, ...]:
        self.tokens += len(self._chat.observation(messages, None))
        # To such a server a message of role `tool` replies to a call in a form of its own, so the
        # user tells the results, as in Qwen's chat template.
        forms = {"tool": "<tool_response>\n{}\n</tool_response>", "user": "{}"}
        content = "\n".join(forms[m["role"]].format(m["content"]) for m in messages)
        self._messages.append({"role": "user", "content": content})
        return ()

    def fork(self) -> Conversation:
        branch = copy.copy(self)
        branch._messages = [*self._messages]
        return branch

    def close(self) -> None:
        """There is nothing to free: the server keeps no history."""
