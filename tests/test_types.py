import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import turnrl
from turnrl import (
    DataError,
    Question,
    QuestionSource,
    Reading,
    RecipeError,
    Segmenter,
    Tool,
    ToolResult,
    Trajectory,
    Turn,
    TurnReward,
    TurnRLError,
)

QUESTION = Question("q", "Who?", ("Ada",))
ids = st.lists(st.integers(0, 99), max_size=4).map(tuple)
turns = st.tuples(ids, ids).map(
    lambda both: Turn("", both[0], tuple(-float(i) for i in both[0]), Reading(), (), both[1])
)


def test_tokens_stand_in_the_order_they_were_read_and_sampled():
    one = Turn("a", (3, 4), (-0.3, -0.4), Reading(), (ToolResult("x"),), (5, 6))
    two = Turn("b", (7,), (-0.7,), Reading(answer="Ada"))
    trajectory = Trajectory(QUESTION, (1, 2), (one, two), "answer")
    assert trajectory.token_ids == (1, 2, 3, 4, 5, 6, 7)
    assert trajectory.turn_index == (-1, -1, 0, 0, -1, -1, 1)
    assert trajectory.sampler_logprobs == (0, 0, -0.3, -0.4, 0, 0, -0.7)
    assert trajectory.token_row == (
        trajectory.token_ids,
        [*[False] * 2, *[True] * 2, *[False] * 2, True],
    )
    assert trajectory.answer == "Ada"
    assert trajectory.results == (ToolResult("x"),)


@given(ids, st.lists(turns, min_size=1, max_size=4))
def test_every_sampled_token_knows_its_turn_and_no_other_token_has_one(prompt, taken):
    trajectory = Trajectory(QUESTION, prompt, tuple(taken), "turns")
    streams = (trajectory.token_ids, trajectory.turn_index, trajectory.sampler_logprobs)
    assert len({len(stream) for stream in streams}) == 1
    for k, turn in enumerate(taken):
        own = [i for i, number in enumerate(trajectory.turn_index) if number == k]
        assert tuple(trajectory.token_ids[i] for i in own) == turn.token_ids
        assert tuple(trajectory.sampler_logprobs[i] for i in own) == turn.sampler_logprobs
    sampled = sum(len(turn.token_ids) for turn in taken)
    assert sum(number >= 0 for number in trajectory.turn_index) == sampled


def test_the_answer_is_that_of_the_last_turn():
    last = Turn("", (), (), Reading())
    assert Trajectory(QUESTION, (), (last,), "turns").answer is None


@pytest.mark.parametrize("stream", ["token_ids", "turn_index", "sampler_logprobs", "token_row"])
def test_a_trajectory_without_tokens_has_its_texts_and_names_itself_if_asked_for_tokens(stream):
    turn = Turn("It is Ada.", (), (), Reading(answer="Ada"))
    trajectory = Trajectory(QUESTION, None, (turn,), "answer")
    assert trajectory.answer == "Ada"
    assert "It is Ada." in str(trajectory)
    with pytest.raises(RecipeError, match="question 'q' has no tokens: a sampler of messages"):
        getattr(trajectory, stream)


def test_data_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        QUESTION.text = "What?"


@pytest.mark.parametrize("abstract", [Tool, Segmenter, TurnReward, QuestionSource])
def test_what_plugins_extend_is_abstract(abstract):
    with pytest.raises(TypeError, match="abstract"):
        abstract()


def test_a_tool_needs_no_check_of_its_own():
    class Nothing(Tool):
        def run(self, calls):
            return []

    assert Nothing().check() is None


def test_a_source_without_a_corpus_says_so():
    class Bare(QuestionSource):
        def questions(self, split):
            return []

    with pytest.raises(DataError, match="Bare has questions but no corpus"):
        Bare().passages()


def test_every_error_is_a_turnrl_error_and_one_of_the_standard_library():
    names = [name for name in turnrl.__all__ if name.endswith("Error")]
    errors = [getattr(turnrl, name) for name in names]
    assert len(errors) == 12
    for error in errors:
        assert issubclass(error, TurnRLError)
        assert error.exit_code in (1, 2)
        others = {cls for cls in error.__mro__ if not issubclass(cls, TurnRLError)}
        assert error is TurnRLError or others - {Exception, BaseException, object}


def test_faults_of_the_world_have_one_name_and_exit_with_1():
    for error in (turnrl.ToolError, turnrl.RewardError, turnrl.EngineError):
        assert issubclass(error, turnrl.WorldError)
        assert error.exit_code == 1
    assert not issubclass(turnrl.RecipeError, turnrl.WorldError)


def test_every_public_name_is_there():
    for name in turnrl.__all__:
        assert getattr(turnrl, name) is not None
    assert dir(turnrl) == sorted(turnrl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Turns'"):
        _ = turnrl.Turns
