"""A scheme of turns, a tool and a scripted policy, with which rollouts are played."""

from __future__ import annotations

import json

from turnrl import Question, Reading, Segmenter, Tool, ToolCall, ToolResult
from turnrl.testing import ScriptedEngine

QUESTION = Question("q1", "What is the capital of France?", ("Paris",))
CALL = '[look {"query": "x"}]'


class Brackets(Segmenter):
    """[name {json}] calls a tool, =text answers; a scheme unlike the bundled ones."""

    stop = ("]",)
    tags = ("result",)

    def __init__(self, max_turns: int = 3) -> None:
        self.max_turns = max_turns

    def prompt(self, question, tools):
        return [{"role": "user", "content": question.text}]

    def read(self, text, turn, cut):
        if cut:
            return Reading(format_error="cut short")
        if text.startswith("="):
            return Reading(answer=text[1:])
        calls = []
        for part in text.split(";"):
            name, _, body = part.strip("[]").partition(" ")
            try:
                arguments = dict(json.loads(body))
                calls.append(ToolCall(name, arguments, None if name else "no name"))
            except (ValueError, TypeError, RecursionError) as error:
                calls.append(ToolCall("", error=f"bad JSON: {error}"))
        return Reading(tuple(calls))

    def observe(self, reading, results):
        shown = [f"<result>{r.content}</result>" for r in results]
        return [{"role": "user", "content": "".join(shown) or "call or answer"}]


class Look(Tool):
    """Looks things up, and keeps the queries of each batch of calls."""

    name = "look"
    description = "Looks things up."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(self, reply=lambda query: f"about {query}", timeout_s=5.0):
        self.reply = reply
        self.timeout_s = timeout_s
        self.batches = []

    def run(self, calls):
        self.batches.append([c.arguments["query"] for c in calls])
        return [ToolResult(self.reply(c.arguments["query"])) for c in calls]


def collect(rollout, chat, says, questions=(QUESTION,), group_size=1):
    """The groups of a rollout. `says` is the policy: a function of the number of the attempt and of
    the turn."""
    groups, _ = collect_with_engine(rollout, chat, says, questions, group_size)
    return groups


def collect_with_engine(rollout, chat, says, questions=(QUESTION,), group_size=1):
    """The groups of a rollout, and the engine that sampled them."""
    engine = ScriptedEngine(chat.tokenizer, says)
    return rollout.play(engine, chat, questions, group_size, (0,)), engine


def play_one(rollout, chat, says):
    """The trajectory of one attempt at one question."""
    ((trajectory,),) = collect(rollout, chat, says)
    return trajectory


def encode(chat, text):
    """The tokens of a text."""
    return chat.tokenizer(text, add_special_tokens=False)["input_ids"]


def say(*texts):
    """A policy that says these texts, one in each turn of each attempt."""
    return lambda session, turn: texts[turn]


FORGETFUL_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'].split('</think>')[-1] if not loop.last else message['content'] }}"
    "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that drops thoughts from every message but the last."""
