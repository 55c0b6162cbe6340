import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnrl import Question, ToolResult, Trajectory, Turn
from turnrl.testing import check_reward
from turnrl_rewards.qa import AnswerPresent, AnswerRetrieved, ExactMatch, ToolExecuted, WellFormed
from turnrl_segmenters.two_turn import TwoTurn

CALL = '<reasoning>t</reasoning><tool>{"name": "search", "args": {"query": "q"}}</tool>'
ANSWER = "<reasoning>t</reasoning><answer>Paris</answer>"


def trajectory(*texts: str, answers=("Paris",), results=()) -> Trajectory:
    """What `TwoTurn` reads in the texts, with the given results of the first turn."""
    turns = [Turn(text, TwoTurn().read(text, k, False)) for k, text in enumerate(texts)]
    first = turns[0]
    turns[0] = Turn(first.text, first.reading, tuple(results))
    return Trajectory(Question("q", "The capital?", answers), tuple(turns), "answer")


def answering(answer: str, *answers: str) -> Trajectory:
    text = f"<reasoning>t</reasoning><answer>{answer}</answer>"
    return trajectory(text, answers=answers or ("Paris",))


def test_a_good_trajectory_earns_the_magnitudes_of_the_paper():
    good = trajectory(CALL, ANSWER, results=[ToolResult("Paris is the capital.")])
    assert [ToolExecuted().score(good, k) for k in (0, 1)] == [0.2, 0]
    assert [AnswerRetrieved().score(good, k) for k in (0, 1)] == [0.5, 0]
    assert AnswerPresent().score(good) == 0.5
    assert ExactMatch().score(good) == 1.0
    assert WellFormed().score(good) == 0.4


@pytest.mark.parametrize("weight", [0.0, 3.0, -1.0])
def test_a_weight_is_the_magnitude_of_its_reward(weight):
    good = trajectory(CALL, ANSWER, results=[ToolResult("Paris is the capital.")])
    assert ToolExecuted(weight).score(good, 0) == weight
    assert AnswerRetrieved(weight).score(good, 0) == weight
    assert AnswerPresent(weight).score(good) == weight
    assert ExactMatch(weight).score(good) == weight
    assert WellFormed(weight).score(good) == weight


def test_tool_executed_pays_the_share_of_calls_that_succeeded():
    turn = trajectory(CALL).turns[0]
    results = (ToolResult("a"), ToolResult("b", ok=False), ToolResult("c", ok=False))
    three = Turn("", type(turn.reading)(calls=turn.reading.calls * 3), results)
    attempt = Trajectory(Question("q", "?", ("Paris",)), (three,), "turns")
    assert ToolExecuted(0.6).score(attempt, 0) == pytest.approx(0.2)


def test_answers_are_found_only_as_whole_words():
    part = trajectory(CALL, ANSWER, answers=("art",), results=[ToolResult("Bonaparte")])
    assert AnswerRetrieved().score(part, 0) == 0
    assert AnswerPresent().score(answering("Bonaparte", "art")) == 0


@pytest.mark.parametrize("gold", ["", " ", "The", "...", "a"])
@pytest.mark.parametrize("given_answer", ["the", "?", "Paris"])
def test_an_answer_that_normalises_to_nothing_is_never_hit(gold, given_answer):
    attempt = answering(given_answer, gold)
    assert ExactMatch().score(attempt) == AnswerPresent().score(attempt) == 0
    searched = trajectory(CALL, ANSWER, answers=(gold,), results=[ToolResult("the, a.")])
    assert AnswerRetrieved().score(searched, 0) == 0


def test_answer_present_pays_in_proportion_to_the_share_of_words():
    assert AnswerPresent().score(answering("Paris, France")) == 0.25  # 0.5 x 1 / 2
    # the longest accepted answer counts: 0.5 x 2 / 4
    assert AnswerPresent().score(answering("it is New York", "York", "New York")) == 0.25
    assert AnswerPresent().score(answering("Paris Paris Paris Paris")) == 0.125


words = st.sampled_from(["new", "york", "paris", "rome", "saint", "denis"])
candidates = st.lists(st.lists(words, min_size=1, max_size=3).map(" ".join), min_size=1, max_size=5)


@given(candidates, st.data())
def test_listing_candidates_never_beats_the_best_single_guess(guesses, data):
    odds = data.draw(st.lists(st.integers(0, 9), min_size=len(guesses), max_size=len(guesses)))

    def expected(answer: str) -> float:
        """Mean reward (unnormalised) if each candidate is the right one with its odds."""
        rewards = [AnswerPresent().score(answering(answer, gold)) for gold in guesses]
        return sum(o * r for o, r in zip(odds, rewards, strict=True))

    assert expected(" ".join(guesses)) <= max(map(expected, guesses)) + 1e-9


@pytest.mark.parametrize("texts", [
    ("",), ("lorem ipsum Paris", "dolor Paris sit"),
    ("<reasoning>Paris</reasoning>", "<reasoning>Paris</reasoning>"),
    ("<result>Paris</result>", "Paris</answer>"),
    ("<reasoning><tool><answer>Paris", "<answer></answer>"), ("<answer>Paris</answer",),
])  # fmt: skip
def test_garbage_earns_exactly_nothing(texts):
    garbage = trajectory(*texts)
    turns = range(len(texts))
    for reward in (AnswerPresent(), ExactMatch(), WellFormed()):
        assert reward.score(garbage) == 0
    assert [ToolExecuted().score(garbage, k) for k in turns] == [0] * len(texts)
    assert [AnswerRetrieved().score(garbage, k) for k in turns] == [0] * len(texts)


def test_format_earns_the_share_of_good_turns_and_only_with_an_answer():
    assert WellFormed().score(trajectory("nonsense", ANSWER)) == 0.2  # one turn of two
    assert WellFormed().score(trajectory(CALL, "nonsense")) == 0
    assert WellFormed().score(answering("...")) == 0


@pytest.mark.parametrize(
    "reward", [ToolExecuted, AnswerRetrieved, AnswerPresent, ExactMatch, WellFormed]
)
def test_a_reward_keeps_to_the_contract(reward):
    check_reward(reward())
    check_reward(reward(weight=7.5))
