"""Conversations: one history at an engine, or at a sampler of messages.

Both take messages and give replies, so an attempt need not know which one it has. An engine gets
token ids: messages are rendered once and appended. A sampler of messages gets the messages
themselves, but the limits of a rollout still count the policy's tokens.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import final

from turnrl.agent.chat import ChatFormat, tool_schema
from turnrl.agent.messages import on_the_wire, plain_text
from turnrl.types import Message, MessageSampler, Reply, Sample, Sampling, Session, ToolSpec

_TOOLS = "\n\n# Tools\n\nYou can call these functions:\n<tools>\n{}\n</tools>"


class Conversation(ABC):
    """One history at the sampler that writes its turns.

    Attributes:
        messages: The history as messages, replies included.
        tools: The tools that its prompt describes.
        sample: The history as tokens; None for a sampler of messages.
        tokens: The length so far in the policy's tokens, including messages without a reply yet.
        broken: True if a turn was begun and not ended, so that no turn can follow.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    sample: Sample | None = None
    tokens: int
    broken: bool = False

    @abstractmethod
    async def take_turn(self, turn: int, sampling: Sampling) -> Reply:
        """Sample a turn."""

    @abstractmethod
    def append_messages(self, messages: Sequence[Message]) -> None:
        """Append messages for the next turn to answer."""

    @abstractmethod
    def fork(self) -> Conversation:
        """A copy that goes on independently from here."""

    @abstractmethod
    def close(self) -> None:
        """Free what the sampler holds for this history."""

    def messages_beyond(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> Sequence[Message] | None:
        """The messages that come after this history; None if `messages` do not begin with
        it, if anything but messages of a user or a tool comes after it, or if its prompt describes
        other tools."""
        own = self.messages
        rest = messages[len(own) :]
        replies = rest and all(message["role"] in ("user", "tool") for message in rest)
        same = tuple(messages[: len(own)]) == own and _schemas(tools) == _schemas(self.tools)
        return rest if replies and same and not self.broken else None


@final
class TokenConversation(Conversation):
    """A session of an engine.

    Args:
        session: A session whose history is the prompt.
        chat: The policy's chat format.
        messages: The prompt.
        tools: The tools that the prompt describes.
        prompt_ids: The prompt as tokens.
    """

    def __init__(
        self,
        session: Session,
        chat: ChatFormat,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        prompt_ids: tuple[int, ...],
    ) -> None:
        self.session, self._chat = session, chat
        self.messages, self.tools = tuple(messages), tuple(tools)
        self.sample: Sample = Sample().read(prompt_ids)
        self.tokens = len(prompt_ids)
        self._new_ids: tuple[int, ...] = ()
        self._last: int | None = None

    async def take_turn(self, turn: int, sampling: Sampling) -> Reply:
        sampling = replace(sampling, end_ids=self._chat.end_ids)
        done = await self.session.generate(self._new_ids, sampling)
        # new messages are part of the history only once the engine has read them
        read = self.sample.read(self._new_ids)
        self.sample = read.wrote(turn, done.token_ids, done.logprobs, done.version)
        self.tokens += len(done.token_ids)
        self._last = done.token_ids[-1] if done.token_ids else None
        text = self._chat.decode_turn(done.token_ids)
        self.messages += ({"role": "assistant", "content": text},)
        return Reply(text, done.reason == "length")

    def append_messages(self, messages: Sequence[Message]) -> None:
        self._new_ids = self._chat.encode_observation(messages, self._last)
        self.messages += tuple(messages)
        self.tokens += len(self._new_ids)

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
        sampler: Writes the replies.
        chat: The policy's chat format, which counts the tokens.
        messages: The prompt.
        specs: Tools that a chat template would describe; here the system message describes them.
    """

    def __init__(
        self,
        sampler: MessageSampler,
        chat: ChatFormat,
        messages: Sequence[Message],
        specs: Sequence[ToolSpec],
    ) -> None:
        self._sampler, self._chat = sampler, chat
        self.messages, self.tools = tuple(messages), tuple(specs)
        self.tokens = len(chat.encode_prompt(messages, specs))
        self._sent = tuple(_join_tool_messages(messages))
        if specs:
            first, *others = self._sent
            if first["role"] != "system":
                first, others = {"role": "system", "content": ""}, [*self._sent]
            content = (plain_text(first) + _TOOLS.format("\n".join(_schemas(specs)))).strip()
            self._sent = ({"role": "system", "content": content}, *others)

    async def take_turn(self, turn: int, sampling: Sampling) -> Reply:
        reply = await self._sampler.reply(self._sent, sampling)
        answer: Message = {"role": "assistant", "content": reply.text}
        self._sent, self.messages = (*self._sent, answer), (*self.messages, answer)
        self.tokens += self._chat.count_tokens(reply.text)
        return reply

    def append_messages(self, messages: Sequence[Message]) -> None:
        self.messages += tuple(messages)
        self.tokens += len(self._chat.encode_observation(messages, None))
        self._sent = (*self._sent, *_join_tool_messages(messages))

    def fork(self) -> Conversation:
        return copy.copy(self)

    def close(self) -> None:
        """There is nothing to free: the server keeps no history."""


def _schemas(tools: Sequence[ToolSpec]) -> list[str]:
    return [json.dumps(tool_schema(tool), default=dict) for tool in tools]


def _join_tool_messages(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages, with each run of `tool` and `user` messages joined into one of the user, as in
    Qwen's chat template. A server would take a message of role `tool` for the reply to a call in
    its own format. With calls in the history, it is one, so these messages stay as they are."""
    if any("tool_calls" in message or "tool_call_id" in message for message in messages):
        yield from map(on_the_wire, messages)
        return
    forms = {"tool": "<tool_response>\n{}\n</tool_response>", "user": "{}"}
    for are_replies, neighbours in groupby(messages, lambda message: message["role"] in forms):
        if are_replies:
            content = "\n".join(forms[m["role"]].format(plain_text(m)) for m in neighbours)
            yield {"role": "user", "content": content}
        else:
            yield from neighbours
