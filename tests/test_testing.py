"""The conformance kit catches what it is there to catch."""

import math

import pytest

from turnrl import (
    OutcomeReward,
    Question,
    Reading,
    Segmenter,
    Tool,
    ToolCall,
    ToolResult,
    TurnReward,
)
from turnrl.testing import check_reward, check_segmenter, check_tool, example_trajectories


class Upper(Tool):
    """Repeats a text in capitals."""

    name = "upper"
    description = "Repeat a text in capitals."
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    }

    def run(self, calls):
        texts = [call.arguments["text"] for call in calls]
        return [ToolResult(t.upper()) if t else ToolResult("no text", ok=False) for t in texts]


class Patient(Upper):
    async def run(self, calls):
        return Upper.run(self, calls)


GOOD, BAD = [{"text": "a"}, {"text": "b"}], [{"text": ""}, {"text": 7}, {}]


@pytest.mark.parametrize("tool", [Upper, Patient])
def test_a_good_tool_passes(tool):
    check_tool(tool(), GOOD, BAD)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"name": "two words"}, "Upper.name is 'two words'"),
        ({"description": " "}, "Upper.description is empty"),
        ({"parameters": {"type": "string"}}, "must be the JSON Schema of an object"),
        (
            {"parameters": {"type": "object", "required": ["word"]}},
            r"rejects the good call {'text': 'a'}.*'word' is a required",
        ),
        ({"run": lambda calls: None}, "must give a result per call, not None"),
        ({"run": lambda calls: [ToolResult("A")]}, "must give a result per call"),
        ({"run": lambda calls: ["A" for _ in calls]}, "must give ToolResults with a text, not 'A'"),
        ({"run": lambda calls: [ToolResult("A", False) for _ in calls]}, "fails on the good call"),
        ({"run": lambda calls: Upper().run(calls)[::-1]}, "in the order of the calls"),
        (
            {"run": lambda calls: [ToolResult("A") for _ in calls]},
            "accepts the bad call {'text': ''}",
        ),
    ],
)
def test_a_broken_tool_is_caught(broken, message):
    tool = Upper()
    vars(tool).update(broken)
    with pytest.raises(AssertionError, match=message):
        check_tool(tool, GOOD, BAD)


class Plain(Segmenter):
    """The whole text is the answer."""

    max_turns = 1

    def prompt(self, question, tools):
        return [{"role": "user", "content": question.text}]

    def read(self, text, turn):
        return Reading(answer=text)

    def observe(self, reading, results):
        return "".join(result.content for result in results) or "answer"


def test_a_good_segmenter_passes():
    check_segmenter(Plain())


CALL = Reading((ToolCall("x"),))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"max_turns": 0}, "max_turns is 0"),
        ({"stop": "</answer>"}, "stop must be a tuple of texts"),
        ({"stop": ("</answer>",)}, "'answer' must be in its tags"),
        ({"prompt": lambda question, tools: []}, "gives no messages"),
        (
            {"prompt": lambda question, tools: [{"role": "system", "content": question.text}]},
            "must end with the user's message",
        ),
        (
            {"prompt": lambda question, tools: [{"role": "user", "content": "?"}]},
            "leaves the question out",
        ),
        ({"prompt": lambda question, tools: [{"role": "user"}]}, "is no chat message"),
        ({"read": lambda text, turn: Reading(answer=text[0])}, "on '' it raised IndexError"),
        ({"read": lambda text, turn: None}, "which is no Reading"),
        ({"read": lambda text, turn: Reading()}, "needs a format_error"),
        ({"read": lambda text, turn: Reading((ToolCall(""),))}, "neither name nor error"),
        ({"observe": lambda reading, results: ""}, "gave an empty text"),
        (
            {"read": lambda text, turn: CALL, "observe": lambda reading, results: "..."},
            "must show each result as it is",
        ),
        ({"tags": ("answer",)}, "takes plain text for a well-formed turn"),
    ],
)
def test_a_broken_segmenter_is_caught(broken, message):
    segmenter = Plain()
    vars(segmenter).update(broken)
    with pytest.raises(AssertionError, match=message):
        check_segmenter(segmenter)


class Right(OutcomeReward):
    """1 for the first accepted answer, word for word."""

    def score(self, trajectory):
        return float(
            trajectory.answer in trajectory.question.answers[:1] and trajectory.answer != ""
        )


class Calls(TurnReward):
    """1 for each call."""

    def score(self, trajectory, turn):
        return float(len(trajectory.turns[turn].reading.calls))


@pytest.mark.parametrize("reward", [Right, Calls])
def test_a_good_reward_passes(reward):
    check_reward(reward())


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda trajectory: math.nan, "gave nan for 'right after a search', which is not a finite"),
        (lambda trajectory: None, "gave None for"),
        (lambda trajectory: float(trajectory.answer is None), "garbage may earn nothing"),
        (lambda trajectory: float("Euro" in trajectory.turns[0].text), "that names the answer"),
        (lambda trajectory, seen=[]: float(len(seen.append(1) or seen)), "the second time"),
    ],
)
def test_a_broken_reward_is_caught(score, message):
    reward = Right()
    reward.score = score
    with pytest.raises(AssertionError, match=message):
        check_reward(reward)


def test_the_examples_hold_every_way_to_end():
    examples = example_trajectories()
    assert {t.stop for t in examples.values()} == {"answer", "turns"}
    assert {len(t.turns) for t in examples.values()} == {1, 2}
    for trajectory in examples.values():
        assert isinstance(trajectory.question, Question)
        for turn in trajectory.turns:
            assert len(turn.results) == len(turn.reading.calls)
            assert len(turn.token_ids) == len(turn.logprobs)
