"""Players that are a function, and attempts in which the model writes what a test says."""

import asyncio

from turnrl import Player, Question, Rollout
from turnrl.agent.chat import ChatFormat
from turnrl.testing import ScriptedEngine
from worlds import Echo, Letters

QUESTION = Question("q", "Where is it?", ("here",))
USER = [{"role": "user", "content": "?"}]


class FunctionPlayer(Player):
    """Plays as a function of the attempt says."""

    max_turns = 4

    def __init__(self, play):
        self._play = play

    async def play(self, attempt):
        return await self._play(attempt)


class ActingEcho(Echo):
    """Changes the world, so it runs in the last turn too."""

    acts = True


def scripted(policy, player, texts, tools=(), questions=(QUESTION,), size=1, **options):
    """The attempts of a player whose model writes the texts, by the number of the turn, or says
    what a coroutine function of session and turn returns."""

    async def says(session, turn):
        await asyncio.sleep(0)
        return texts[turn % len(texts)]

    engine = ScriptedEngine(policy.tokenizer, texts if callable(texts) else says)
    limits = {"max_turn_tokens": 40, "max_tokens": 400, **options}
    rollout = Rollout(player=player, tools=list(tools), **limits)
    chat = ChatFormat(policy.tokenizer)
    with rollout.running_tools():
        attempts = rollout.begin(engine, chat, list(questions), size, (0,), 0).result()
    assert not engine.open_sessions
    return attempts


def play_one(policy, play, texts=("x",), tools=(), **options):
    """The attempt of a player that is such a function."""
    (trajectory,) = scripted(policy, FunctionPlayer(play), texts, tools, **options).trajectories[0]
    return trajectory


def walked(policy, tool, texts, segmenter=None, **options):
    """The attempt of a policy that writes the texts in the turns of a segmenter."""
    chat = ChatFormat(policy.tokenizer)
    engine = ScriptedEngine(policy.tokenizer, lambda session, turn: texts[turn])
    limits = {"max_turn_tokens": 40, "max_tokens": 400, **options}
    tools = tool if isinstance(tool, list) else [tool]
    rollout = Rollout(segmenter or Letters(), tools, **limits)
    (trajectory,) = rollout.play(engine, chat, [QUESTION], 1, (0,))[0]
    return trajectory
