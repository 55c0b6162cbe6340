"""Rules and rewards on texts that are meant to be slow to read."""

from __future__ import annotations

import importlib.util
import threading

import pytest

from hostile import MOST_S, cpu_s, too_slow
from turnrl import Question, Reading, ToolCall, ToolResult, Trajectory, Turn, score_group
from turnrl.rewards.answers import is_empty_answer
from turnrl.rewards.scoring import compute_curves
from turnrl.types import Phrase
from turnrl_rewards import (
    F1,
    AnswerPresent,
    AnswerRetrieved,
    AnswerSeen,
    Choice,
    ExactMatch,
    FirstHit,
    Math,
    Number,
    Progress,
    Repetition,
    SearchCost,
    SupportSeen,
    ToolExecuted,
    WellFormed,
)
from turnrl_rewards.expressions import same_expression
from turnrl_segmenters import ReAct, SearchR1, TwoTurn

RULES = {
    "phrase": (Phrase(), ("Paris", "City of Light")),
    "number": (Number(), ("12", "1/2")),
    "tolerance": (Number(tolerance=0.1, relative=0.01), ("12",)),
    "choice": (Choice(), ("B", "A")),
}
if importlib.util.find_spec("math_verify"):
    RULES["math"] = (Math(), (r"\frac{1}{2}", "x^2"))
REWARDS = [
    *(ToolExecuted(), AnswerRetrieved(), AnswerPresent(), ExactMatch(), WellFormed(), F1()),
    *(SearchCost(), Repetition(), FirstHit(), Progress(AnswerSeen()), Progress(SupportSeen())),
]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_no_answer_takes_long_to_compare(rule):
    question = Question("q", "What?", RULES[rule][1], rule=RULES[rule][0])

    def compare(text):
        Question("q", "What?", (text,), rule=question.rule)
        for reward in (ExactMatch(), AnswerPresent()):
            reward.score(Trajectory(question, (Turn("", Reading(answer=text)),), "answer"))

    assert not too_slow(compare)
    assert not too_slow(compare, before="The answer is ", after=" or 12, so B")
    assert not too_slow(lambda text: is_empty_answer(text, question))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["phrase", "number"])
def test_no_result_or_call_takes_long_to_score(rule):
    question = Question(
        "q", "What?", RULES[rule][1], {"supporting_ids": ["x"]}, rule=RULES[rule][0]
    )
    for found in ("", " Paris 12"):

        def score(text, found=found):
            call, result = ToolCall("search", {"query": text}), ToolResult(text + found)
            searched = Turn(text, Reading((call,)), (result,))
            attempt = Trajectory(question, (searched, Turn(text, Reading(answer="x"))), "answer")
            compute_curves(attempt)

        assert not too_slow(score)


@pytest.mark.parametrize("text", [
    "9^{9^{9^9}}", "10^{10^{10^{10}}}", "99999999!", r"\sum_{i=1}^{10^9} i", "(x+1)^{3000}",
    "2^{2^{2^{2^{2^{2}}}}}", r"\binom{10^9}{10^8}", "(" * 900, r"\sqrt{" * 300, "9" * 1999,
    r"\prod_{i=1}^{10^8} i", "x^{" * 600, "1+" * 900 + "1", "9**9**9**9", "(((x+y)^9)^9)^9)",
])  # fmt: skip
def test_no_expression_takes_long_in_any_thread(text):
    pytest.importorskip("math_verify")
    assert not same_expression(text, "5")
    same_expression.cache_clear()
    seconds = []
    thread = threading.Thread(target=lambda: seconds.append(cpu_s(lambda: Math().same(text, "5"))))
    thread.start()
    thread.join()
    assert seconds[0] < MOST_S
    assert Math().same(text, text)
    assert Math().same("1/2", r"\frac{1}{2}")  # the next one is answered


def test_the_bundled_rewards_take_little_time_for_a_few_hostile_texts():
    question = Question("q", "What?", ("Paris",), {"supporting_ids": ["x"]})
    for text in ("{" * 20_000, " a" * 10_000, "</think>" * 2500, "[" * 10_000 + "]" * 10_000):
        calls = tuple(ToolCall("search", {"query": text, str(n): [text]}) for n in range(2))
        results = (ToolResult(text), ToolResult(text + "Paris"))
        searched = Turn(text, Reading(calls), results)
        attempt = Trajectory(question, (searched, Turn("", Reading(answer=text))), "answer")
        assert cpu_s(lambda attempt=attempt: score_group([attempt], REWARDS)) < 5 * MOST_S


@pytest.mark.parametrize(
    "unseen", ["\u200b", "\u3164", " \ufeff\n", "\u2060\u00ad", "\u0301", "\x00"]
)
def test_an_answer_that_nobody_sees_is_empty_in_every_scheme(unseen):
    texts = {
        TwoTurn(): f"<reasoning>so</reasoning><answer>{unseen}</answer>",
        ReAct(): f"<think>so</think> <answer>{unseen}</answer>",
        SearchR1(): f"<think>so</think> <answer>{unseen}</answer>",
    }
    question = Question("q", "What?", ("Paris",))
    for scheme, text in texts.items():
        for turn in range(scheme.max_turns):
            reading = scheme.read(text, turn, False)
            assert reading.format_error == "the answer is empty"
            attempt = Trajectory(question, (Turn(text, reading),), "turns")
            assert WellFormed().score(attempt) == compute_curves(attempt)["format"] == 0
    assert is_empty_answer(unseen, question)
    assert is_empty_answer(f"{unseen}. -", question)
    assert not is_empty_answer("π", question)
