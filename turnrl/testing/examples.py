"""Attempts at one question, to try a reward or an estimator on."""

from turnrl.types.questions import Question
from turnrl.types.trajectory import Reading, Sample, ToolCall, ToolResult, Trajectory, Turn

Step = tuple[Reading, tuple[ToolResult, ...]]

QUESTION = Question("q", "What is the time zone of Utrecht?", ("Europe/Amsterdam", "CET"))


def search_step(*results: ToolResult, query: str = "Utrecht") -> Step:
    """A turn of searches with these results."""
    call = ToolCall("search", {"query": query})
    return Reading((call,) * len(results)), results


PAGE = ToolResult("Utrecht is in the time zone Europe/Amsterdam.")
SEARCHED = search_step(PAGE)
RIGHT: Step = (Reading(answer="Europe/Amsterdam"), ())
GARBLED: Step = (Reading(format_error="no tool call or answer"), ())
UNREADABLE = Reading((ToolCall("", error="bad JSON"),), None, "bad JSON")


def make_trajectory(*steps: Step, text: str = "text", of: Question = QUESTION) -> Trajectory:
    """A trajectory of steps that all have the same text."""
    sample = Sample().read((1, 2, 3))
    for k, (_, results) in enumerate(steps):
        sample = sample.wrote(k, (7, 8, 9), (-0.1,) * 3)
        if results and k + 1 < len(steps):
            sample = sample.read((5,))
    turns = tuple(Turn(text, *step) for step in steps)
    answered = turns[-1].reading.answer is not None
    return Trajectory(of, turns, "answer" if answered else "turns", (sample,))


def example_trajectories() -> dict[str, Trajectory]:
    """Attempts at one question, by name: good ones, failed ones, and garbage."""
    empty: Step = (Reading(answer="", format_error="the answer is empty"), ())
    no_tool = ToolResult("no such tool", ok=False)
    unanswerable = Question("q", "What?", ("", "the"))
    return {
        "right after a search": make_trajectory(SEARCHED, RIGHT),
        "right without a search": make_trajectory(RIGHT),
        "wrong after a search": make_trajectory(SEARCHED, (Reading(answer="Asia/Tokyo"), ())),
        "answer among others": make_trajectory(SEARCHED, (Reading(answer="CET or Asia/Tokyo"), ())),
        "nothing found": make_trajectory(search_step(ToolResult("no results")), RIGHT),
        "failed call": make_trajectory(search_step(no_tool), RIGHT),
        "unreadable call": make_trajectory((UNREADABLE, (ToolResult("bad JSON", False),)), RIGHT),
        "two calls, one failed": make_trajectory(search_step(PAGE, no_tool), RIGHT),
        "no accepted answers": make_trajectory(SEARCHED, RIGHT, of=Question("q", "What?")),
        "garbage": make_trajectory(GARBLED, GARBLED),
        "garbage that names the answer": make_trajectory(GARBLED, GARBLED, text="Europe/Amsterdam"),
        "garbage of one turn": make_trajectory(GARBLED),
        "garbage with an empty answer": make_trajectory(empty, of=unanswerable),
    }
