"""A segmenter at work: calls its segmenter to write and read turns, and takes a turn."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar, Literal, final

from turnrl.agent.agent_loop import AgentLoop
from turnrl.agent.attempt import Attempt
from turnrl.agent.chat import ChatFormat
from turnrl.agent.messages import plain_text, to_plain
from turnrl.plugin.errors import PluginError, RecipeError, blaming
from turnrl.types import (
    Ending,
    Message,
    Question,
    Reading,
    Reply,
    Segmenter,
    ToolCall,
    ToolResult,
    ToolSpec,
)

_logger = logging.getLogger(__name__)


async def sample_turn(attempt: Attempt) -> Reply:
    """Sample the next turn of an attempt."""
    (conversation,) = attempt.conversations
    return await attempt.take_turn(conversation, attempt.agent.sampling.stop)


@final
@dataclass(frozen=True)
class SegmenterLoop(AgentLoop):
    """A segmenter, with the tools that it describes. Its methods must not raise. If one does, the
    error blames the segmenter's package.

    Args:
        plugin: The segmenter, which defines a turn.
        specs: The tools of the recipe.
        take_turn: Takes the next turn of an attempt; demonstrations write it.
    """

    plugin: Segmenter
    specs: tuple[ToolSpec, ...]
    take_turn: Callable[[Attempt], Awaitable[Reply]] = sample_turn

    kind: ClassVar[Literal["segmenter"]] = "segmenter"
    branches: ClassVar[bool] = True

    @property
    def stop(self) -> tuple[str, ...]:
        """See `AgentLoop.stop`."""
        return self.plugin.stop

    @property
    def template_tools(self) -> tuple[ToolSpec, ...]:
        """Tools of the recipe that the segmenter leaves to the chat template to describe."""
        return self.specs if self.plugin.tools_in_template else ()

    # ------------------------------------------------------------------ the segmenter's own methods

    def _blaming(self, method: str, argument: object) -> contextlib.AbstractContextManager[None]:
        advice = "It must accept any text; fix it, and try turnrl.testing.check_segmenter on it."
        return blaming(PluginError, f"{self.name}.{method} on {str(argument)[:200]!r}", advice)

    def prompt(self, question: Question, tools: Sequence[ToolSpec]) -> list[Message]:
        """See `Segmenter.prompt`."""
        return self._messages("prompt", question, tools)

    def observe(self, reading: Reading, results: Sequence[ToolResult]) -> list[Message]:
        """See `Segmenter.observe`."""
        return self._messages("observe", reading, results)

    def _messages(self, method: str, about: object, others: Sequence[object]) -> list[Message]:
        """What a method of the segmenter gives, as messages in one form (`to_plain`)."""
        with self._blaming(method, about):
            messages: object = getattr(self.plugin, method)(about, others)
        if not isinstance(messages, list) or not messages:
            raise self._wrong_return(
                method, messages, "a list of messages, the last one of role user or tool"
            )
        with self._blaming(method, about):
            return [to_plain(message) for message in messages]

    def read(self, text: str, turn: int, cut: bool) -> Reading:
        """See `Segmenter.read`."""
        with self._blaming("read", text):
            reading: object = self.plugin.read(text, turn, cut)
        if not isinstance(reading, Reading):
            raise self._wrong_return("read", reading, "a turnrl.Reading")
        return reading

    def _wrong_return(self, method: str, value: object, wanted: str) -> PluginError:
        return PluginError(
            f"{self.name}.{method} gave {value!r:.80}; it gives {wanted}. Fix it, and try "
            "turnrl.testing.check_segmenter on it."
        )

    # ------------------------------------------------------------------ before the first attempt

    def check(self, chat: ChatFormat) -> None:
        """See `AgentLoop.check`."""
        with self._blaming("check", self.specs):
            self.plugin.check(self.specs)
        if not self.specs and self.plugin.max_turns > 1:
            _logger.warning(
                f"model.rollout.tools is empty, and {self.name} takes up to "
                f"{self.plugin.max_turns} turns: whatever the policy calls, it reads that there "
                "is no such tool. Name tools in model.rollout.tools, unless it is to answer from "
                "memory."
            )
        messages = self.messages(Question("check", "?", ("!",)), chat)
        plain = chat.encode_prompt(messages)
        if self.template_tools and chat.encode_prompt(messages, self.template_tools) == plain:
            raise RecipeError(
                f"{self.name} leaves it to the chat template to describe the tools, and the "
                f"policy's does not. {chat.advice('describes them')}"
            )
        self._check_fit(chat.open_thought(messages, self.template_tools), "the prompt")
        call, replies = (ToolCall("check"),), (ToolResult("checked"),)
        for calls, format_error in ((call, None), (call, "wrong"), ((), "wrong")):
            messages = self.observe(Reading(calls, None, format_error), replies[: len(calls)])
            roles = {message.get("role") for message in messages}
            if roles - {"user", "tool"}:
                raise self._wrong_return("observe", messages, "messages of role user or tool")
            chat.encode_observation(messages, None)
            if self.plugin.max_turns > 1:
                self._check_fit(
                    chat.reopened_thought(messages),
                    f"messages of role {', '.join(sorted(map(str, roles)))}",
                )

    def _check_fit(self, opens: str, where: str) -> None:
        if misfit := self.find_misfit(opens, where):
            raise RecipeError(misfit)

    # ------------------------------------------------------------------ an attempt, turn by turn

    def messages(
        self,
        question: Question,
        chat: ChatFormat,
        more: str = "",
        tools: Sequence[ToolSpec] | None = None,
    ) -> list[Message]:
        """Messages that open a trajectory. The question's text is as untrusted as a tool's.

        Args:
            question: What is asked.
            chat: The policy's chat format.
            more: Text that the tools' sessions add to the question.
            tools: Tools that the policy can call; None for the tools of the recipe.
        """
        text = f"{question.text}\n\n{more}" if more else question.text
        question = replace(question, text=chat.neutralize(text, self.plugin.tags))
        messages = self.prompt(question, self.specs if tools is None else tools)
        if not question.system:
            return messages
        # the scheme's own words come last: they explain how to call a tool and how to answer
        own = [plain_text(message) for message in messages if message["role"] == "system"]
        system = "\n\n".join([chat.neutralize(question.system, ()), *own])
        others = [message for message in messages if message["role"] != "system"]
        return [{"role": "system", "content": system}, *others]

    def prompt_ids(self, question: Question, chat: ChatFormat) -> tuple[int, ...]:
        """Token ids of a question's prompt; see `messages`."""
        return chat.encode_prompt(self.messages(question, chat), self.template_tools)

    def check_questions(self, questions: Sequence[Question], chat: ChatFormat) -> None:
        """See `AgentLoop.check_questions`."""
        question = next((q for q in questions if q.system), None)
        if question is None or not self.template_tools:
            return
        messages = self.messages(question, chat)
        if chat.encode_prompt(messages, self.template_tools) == chat.encode_prompt(messages):
            raise RecipeError(
                f"the policy's chat template describes the tools only without a system message, "
                f"and question {question.id!r} has one, {question.system!r:.60}. Leave it out of "
                f"the data, or set {self.name}.instructions to describe the tools."
            )

    def count_prompt_tokens(self, question: Question, chat: ChatFormat, least: int) -> int:
        """See `AgentLoop.count_prompt_tokens`. A tool's session may add to the prompt later."""
        return chat.count_prompt_tokens(self.messages(question, chat), self.template_tools, least)

    def begin(self, attempts: Sequence[Attempt], chat: ChatFormat) -> None:
        """See `AgentLoop.begin`. Consecutive attempts with the same prompt share the work of
        reading it."""
        with contextlib.ExitStack() as roots:  # a shared prompt is freed after the last attempt
            for _, alike in groupby(attempts, lambda a: (id(a.posed), a.sessions.prompt, a.tools)):
                first, *others = alike
                prompt, tools = first.sessions.prompt, first.tools
                messages = self.messages(first.asked, chat, prompt, tools)
                described = tools if self.plugin.tools_in_template else ()
                opened = first.agent.converse(messages, described)
                root = roots.enter_context(contextlib.closing(opened))
                if root.tokens >= first.agent.max_tokens:
                    raise first.room_error(root.tokens)
                for attempt in (first, *others):
                    attempt.conversations.append(root.fork())

    async def advance(self, attempt: Attempt) -> None:
        """See `AgentLoop.advance`. It takes the next turn: sample, read, act, observe.

        Calls are run if the policy can read their results, so not in the last turn, and not in a
        turn that was cut. The last turn still runs calls that act on the world, and only those: a
        search beside them would earn rewards although nobody reads its result. Most schemes read no
        call in the last turn, so what acts there is read as in the turn before.
        """
        agent, k, (conversation,) = attempt.agent, len(attempt.turns), attempt.conversations
        reply = await self.take_turn(attempt)
        reading = self.read(reply.text, k, reply.cut)
        if 0 < k == agent.max_turns - 1 and reading.answer is None and not reading.calls:
            calls = self.read(reply.text, k - 1, reply.cut).calls
            if not reply.cut and attempt.sessions.has_acting_call(calls):
                reading = replace(reading, calls=calls)
        attempt.read(reading)
        why: Ending | None = None
        if reading.answer is not None:
            why = "answer"
        elif reply.cut:
            why = "length"
        elif k + 1 == agent.max_turns:
            why = "turns"
            if attempt.sessions.has_acting_call(reading.calls):
                await attempt.run_calls(reading.calls, unread=True)
        else:
            results = await attempt.call(reading.calls)
            if attempt.ended_by is None:
                conversation.append_messages(self.observe(reading, results))
                why = "length" if conversation.tokens >= agent.max_tokens else None
        if why is not None:
            attempt.end(why)
