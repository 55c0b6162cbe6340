"""Attempts at one question, to try a reward or an estimator on."""

from turnrl.types.questions import Question
from turnrl.types.trajectory import Reading, Sample, ToolCall, ToolResult, Trajectory, Turn

Step = tuple[Reading, tuple[ToolResult, ...]]

QUESTION = Question("q", "What is the time zone of Utrecht?", ("Europe/Amsterdam", "CET"))


def searched(*results: ToolResult, query: str = "Utrecht") -> Step:
    """A turn of searches with these results."""
    call = ToolCall("search", {"query": query})
    return Reading((call,) * len(results)), results


PAGE = ToolResult("Utrecht is in the time zone Europe/Amsterdam.")
SEARCHED = searched(PAGE)
RIGHT: Step = (Reading(answer="Europe/Amsterdam"), ())
GARBLED: Step = (Reading(format_error="no tool call or answer"), ())
UNREADABLE = Reading((ToolCall("", error="bad JSON"),), None, "bad JSON")


def attempt(*steps: Step, text: str = "text", of: Question = QUESTION) -> Trajectory:
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
        "right after a search": attempt(SEARCHED, RIGHT),
        "right without a search": attempt(RIGHT),
        "wrong after a search": attempt(SEARCHED, (Reading(answer="Asia/Tokyo"), ())),
        "answer among others": attempt(SEARCHED, (Reading(answer="CET or Asia/Tokyo"), ())),
        "nothing found": attempt(searched(ToolResult("no results")), RIGHT),
        "failed call": attempt(searched(no_tool), RIGHT),
        "unreadable call": attempt((UNREADABLE, (ToolResult("bad JSON", False),)), RIGHT),
        "two calls, one failed": attempt(searched(PAGE, no_tool), RIGHT),
        "no accepted answers": attempt(SEARCHED, RIGHT, of=Question("q", "What?")),
        "garbage": attempt(GARBLED, GARBLED),
        "garbage that names the answer": attempt(GARBLED, GARBLED, text="Europe/Amsterdam"),
        "garbage of one turn": attempt(GARBLED),
        "garbage with an empty answer": attempt(empty, of=unanswerable),
    }
