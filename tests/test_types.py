import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import turnrl
from trajectories import ids_of, sampled_turn, trajectory
from turnrl import (
    Question,
    Reading,
    RecipeError,
    ToolResult,
    Trajectory,
    Turn,
)
from turnrl.plugin import errors as errors_module
from turnrl.plugin.errors import TurnRLError
from turnrl.types import Sample

QUESTION = Question("q", "Who?", ("Ada",))
ids = st.lists(st.integers(0, 99), max_size=4).map(tuple)
turns = st.tuples(ids, ids, st.integers(0, 9)).map(
    lambda parts: sampled_turn(
        "", parts[0], [-float(i) for i in parts[0]], observed=parts[1], version=parts[2]
    )
)


def test_tokens_keep_the_order_in_which_they_were_read_and_sampled():
    first = sampled_turn(
        "a", (3, 4), (-0.3, -0.4), Reading(), (ToolResult("x"),), (5, 6), version=2
    )
    second = sampled_turn("b", (7,), (-0.7,), Reading(answer="Ada"), version=3)
    whole = trajectory(QUESTION, (1, 2), (first, second), "answer")
    assert whole.samples == (whole.sample,)
    assert whole.sample.token_ids == (1, 2, 3, 4, 5, 6, 7)
    assert whole.sample.turn_index == (-1, -1, 0, 0, -1, -1, 1)
    assert whole.sample.sampler_logprobs == (0, 0, -0.3, -0.4, 0, 0, -0.7)
    assert whole.sample.versions == (-1, -1, 2, 2, -1, -1, 3)
    assert whole.sample.prompt_ids == (1, 2)
    assert len(whole.sample) == whole.tokens == 7
    asked = [*[False] * 2, *[True] * 2, *[False] * 2, True]
    assert whole.token_rows == ((whole.sample.token_ids, asked),)
    assert whole.sampled_turns == (0, 0, 1)
    assert whole.sampler_logprobs == (-0.3, -0.4, -0.7)
    assert whole.versions == (2, 2, 3)
    assert whole.answer == "Ada"
    assert whole.results == (ToolResult("x"),)


@given(ids, st.lists(turns, min_size=1, max_size=4))
def test_every_sampled_token_knows_its_turn_and_no_other_token_has_one(prompt, taken):
    whole = trajectory(QUESTION, prompt, taken, "turns")
    sample = whole.sample
    columns = (sample.token_ids, sample.turn_index, sample.sampler_logprobs, sample.versions)
    assert {len(column) for column in columns} == {len(sample)}
    for k, turn in enumerate(taken):
        own = [i for i, number in enumerate(sample.turn_index) if number == k]
        assert tuple(sample.token_ids[i] for i in own) == turn.ids
        assert tuple(sample.sampler_logprobs[i] for i in own) == turn.logprobs
        assert {sample.versions[i] for i in own} <= {turn.version}
    sampled = sum(len(turn.ids) for turn in taken)
    assert sum(number >= 0 for number in sample.turn_index) == sampled
    for number, logprob, version in zip(*columns[1:], strict=True):
        assert number >= 0 or (logprob, version) == (0, -1)
    assert len(whole.sampled_turns) == len(whole.sampler_logprobs) == len(whole.versions) == sampled


def test_a_sample_grows_and_is_never_rewritten():
    prompt = Sample().read((1, 2))
    grown = prompt.wrote(0, (3, 4), (-0.3, -0.4), (5, 6)).read((7,)).wrote(1, (8,), (-0.8,), 6)
    assert prompt == Sample((1, 2), (-1, -1), (0, 0), (-1, -1))
    assert grown.token_ids == (1, 2, 3, 4, 7, 8)
    assert grown.turn_index == (-1, -1, 0, 0, -1, 1)
    assert grown.sampler_logprobs == (0, 0, -0.3, -0.4, 0, -0.8)
    assert grown.versions == (-1, -1, 5, 6, -1, 6)
    assert grown.prompt_ids == prompt.prompt_ids == (1, 2)
    assert grown.token_ids[: len(prompt)] == prompt.token_ids
    assert Sample().prompt_ids == ()


def test_a_sample_with_columns_of_different_lengths_is_an_error():
    for logprobs, versions in (((-0.1,), 0), ((-0.1, -0.2), (1,))):
        sample = Sample().wrote(0, (3, 4), logprobs, versions)
        whole = Trajectory(QUESTION, (Turn(""),), "turns", (sample,))
        with pytest.raises(ValueError, match="zip"):
            _ = whole.sampler_logprobs, whole.versions


# turn 0 and 2 in a first history, turn 1 in one of its own, turn 3 after a summary
SEVERAL = Trajectory(
    QUESTION,
    (Turn("a"), Turn("b"), Turn("c"), Turn("d", Reading(answer="Ada"))),
    "answer",
    (
        Sample()
        .read((1,))
        .wrote(0, (2, 3), (-0.2, -0.3), (4, 5))
        .read((4,))
        .wrote(2, (5,), (-0.5,), 6),
        Sample().read((6, 7)).wrote(1, (8,), (-0.8,), 5).read((9,)),
        Sample().read((10,)).wrote(3, (11, 12), (-1.1, -1.2), (6, 7)),
    ),
)


def test_a_trajectory_lists_the_tokens_of_one_history_after_another():
    assert SEVERAL.tokens == 5 + 4 + 3
    assert SEVERAL.token_rows == (
        ((1, 2, 3, 4, 5), [False, True, True, False, True]),
        ((6, 7, 8, 9), [False, False, True, False]),
        ((10, 11, 12), [False, True, True]),
    )
    assert SEVERAL.sampled_turns == (0, 0, 2, 1, 3, 3)
    assert SEVERAL.sampler_logprobs == (-0.2, -0.3, -0.5, -0.8, -1.1, -1.2)
    assert SEVERAL.versions == (4, 5, 6, 5, 6, 7)
    with pytest.raises(ValueError, match="too many values"):
        _ = SEVERAL.sample
    assert [ids_of(SEVERAL, k) for k in range(4)] == [(2, 3), (8,), (5,), (11, 12)]


def test_the_history_of_a_turn_is_the_tokens_before_it():
    assert [SEVERAL.history(k) for k in range(4)] == [(1,), (6, 7), (1, 2, 3, 4), (10,)]
    assert SEVERAL.history(4) == (10, 11, 12)


def test_the_final_history_belongs_to_the_last_turn():
    """Whichever history came last, and whether or not anything was sampled in it."""
    first, second, third = SEVERAL.samples
    unanswered = Sample().read((20, 21))
    for samples in ((third, first, second), (unanswered, third, first), (third, unanswered)):
        whole = dataclasses.replace(SEVERAL, samples=samples)
        assert whole.history(3) == (10,)
        assert whole.history(4) == (10, 11, 12)


def test_a_branch_learns_only_its_own_turns_and_reads_the_others_as_context():
    branch = dataclasses.replace(SEVERAL, begins=2)
    # the second history has no turn of its own left
    assert branch.token_rows == (
        ((1, 2, 3, 4, 5), [False, False, False, False, True]),
        ((10, 11, 12), [False, True, True]),
    )
    assert branch.sampled_turns == (2, 3, 3)
    assert branch.sampler_logprobs == (-0.5, -1.1, -1.2)
    assert branch.versions == (6, 6, 7)
    assert branch.samples == SEVERAL.samples
    assert [branch.history(k) for k in range(5)] == [SEVERAL.history(k) for k in range(5)]


@given(ids, st.lists(turns, min_size=1, max_size=4), st.data())
def test_only_turns_from_where_the_trajectory_begins_are_learned(prompt, taken, data):
    begins = data.draw(st.integers(0, len(taken) - 1))
    whole = trajectory(QUESTION, prompt, taken, "turns", begins)
    own = [(k, turn) for k, turn in enumerate(taken) if k >= begins]
    assert whole.sampled_turns == tuple(k for k, turn in own for _ in turn.ids)
    assert whole.sampler_logprobs == tuple(lp for _, turn in own for lp in turn.logprobs)
    assert whole.versions == tuple(turn.version for _, turn in own for _ in turn.ids)
    asked = [token for row in whole.token_rows for token, w in zip(*row, strict=True) if w]
    assert asked == [token for _, turn in own for token in turn.ids]


def test_the_answer_comes_only_from_the_last_turn():
    assert Trajectory(QUESTION, (Turn(""),), "turns").answer is None
    answered = (Turn("", Reading(answer="Ada")), Turn(""))
    assert Trajectory(QUESTION, answered, "turns").answer is None


@pytest.mark.parametrize(
    "stream", ["sample", "token_rows", "sampled_turns", "sampler_logprobs", "versions", "history"]
)
def test_a_trajectory_without_tokens_has_its_texts_and_an_error_for_tokens(stream):
    whole = Trajectory(QUESTION, (Turn("It is Ada.", Reading(answer="Ada")),), "answer")
    assert whole.answer == "Ada"
    assert whole.samples == ()
    assert whole.tokens == 0
    assert "It is Ada." in str(whole)
    with pytest.raises(RecipeError, match="question 'q' has no tokens: a model that only takes"):
        whole.history(0) if stream == "history" else getattr(whole, stream)


def test_every_error_extends_turnrl_error_and_a_standard_library_error():
    found = {name: value for name, value in vars(errors_module).items() if name.endswith("Error")}
    errors = [value for value in found.values() if value.__module__ == errors_module.__name__]
    assert len(errors) == 12
    for error in errors:
        assert issubclass(error, TurnRLError)
        assert error.exit_code in (1, 2)
        others = {cls for cls in error.__mro__ if not issubclass(cls, TurnRLError)}
        assert error is TurnRLError or others - {Exception, BaseException, object}


def test_every_public_name_is_there():
    for name in turnrl.__all__:
        assert getattr(turnrl, name) is not None
    assert dir(turnrl) == sorted(turnrl.__all__)
    with pytest.raises(AttributeError, match=r"attribute.*Turns"):
        _ = turnrl.Turns
