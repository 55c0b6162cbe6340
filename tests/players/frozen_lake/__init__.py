"""FrozenLake of Gymnasium: a toolset that pays by the step, and a player that walks."""

import gymnasium

from turnrl import Player, Question, QuestionSource, Stateful, Tool, ToolCall, ToolResult
from turnrl.types import ToolSession as Session

MOVES = {"l": 0, "d": 1, "r": 2, "u": 3}


class Lake(Session):
    def __init__(self, seed: int) -> None:
        schedule = (10, -1, -0.1)  # for the goal, a hole, any other step
        self.env = gymnasium.make("FrozenLake-v1", is_slippery=False, reward_schedule=schedule)
        self.cell = self.env.reset(seed=seed)[0]
        self.prompt = f"You are in cell {self.cell}."

    def close(self):
        self.env.close()
        return {"cell": float(self.cell)}


class FrozenLake(Stateful, Tool):
    name = "move"
    description = "Move one cell over the ice."
    parameters = {"type": "object", "properties": {"way": {"enum": [*MOVES]}}, "required": ["way"]}
    acts = True

    def open(self, question: Question) -> Lake:
        return Lake(question.metadata["seed"])

    def run(self, calls):
        return [self.step(call.session, MOVES[call.arguments["way"]]) for call in calls]

    def step(self, lake: Lake, move: int) -> ToolResult:
        lake.cell, reward, ended, late, _ = lake.env.step(move)
        return ToolResult(f"You are in cell {lake.cell}.", reward=float(reward), done=ended or late)


class Walker(Player):
    """Takes the first letter that names a way as the move."""

    max_turns = 4

    async def play(self, attempt):
        told = f"{attempt.question.text} {attempt.opening}"
        messages = [{"role": "user", "content": told}]
        while True:
            text = (await attempt.reply(messages)).text
            way = next((letter for letter in text if letter in MOVES), "none")
            (result,) = await attempt.call([ToolCall("move", {"way": way})])
            messages += [{"role": "assistant", "content": text}]
            messages += [{"role": "user", "content": result.content}]


class Lakes(QuestionSource):
    needs_answers = False

    def questions(self, split):
        return [Question(f"{split} {n}", "Go!", metadata={"seed": n}) for n in range(4)]
