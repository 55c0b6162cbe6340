"""The conformance kit catches what it is there to catch."""

import asyncio
import itertools
import math
import re
import threading
import time
from pathlib import Path

import pytest
import torch

from turnrl import (
    AdvantageEstimator,
    DataError,
    Merged,
    OutcomeOnly,
    OutcomeReward,
    Policy,
    Question,
    QuestionSource,
    Reading,
    Sampling,
    Segmenter,
    Stateful,
    Tool,
    ToolCall,
    ToolResult,
    TurnLevel,
    TurnReward,
    score_group,
)
from turnrl.data.sources import GivenQuestions, open_source
from turnrl.rewards.scoring import compute_curves
from turnrl.testing import (
    ScriptedEngine,
    check_estimator,
    check_hacks,
    check_reward,
    check_segmenter,
    check_source,
    check_tool,
    hacked_trajectories,
)
from turnrl.testing.examples import RIGHT, SEARCHED, make_trajectory
from turnrl.types import Passage, ToolSession
from turnrl_atlas import Atlas
from turnrl_rewards import (
    F1,
    AnswerPresent,
    AnswerRetrieved,
    AnswerSeen,
    ExactMatch,
    FirstHit,
    Progress,
    Repetition,
    SearchCost,
    SupportSeen,
    ToolExecuted,
    WellFormed,
)


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
            r"on the good call {'text': 'a'} gives .*'word' is a required .* not a success",
        ),
        (
            {"run": lambda calls: None},
            r"^tool 'upper' \(Upper\) returned None for 1 calls; run\(\) gives a list",
        ),
        ({"run": lambda calls: [ToolResult("A")]}, "returned .* for 2 calls; run.. gives"),
        (
            {"run": lambda calls: [ToolResult("A", False) for _ in calls]},
            r"on the good call {'text': 'a'} gives .*not a success with a text",
        ),
        (
            {"run": lambda calls: Upper().run(calls)[::-1]},
            "in a batch .*: keep the order of the calls",
        ),
        (
            {"run": lambda calls: [ToolResult("A") for _ in calls]},
            r"on the bad call {'text': ''} gives .*content='A'.*not a failure with a reason",
        ),
    ],
)
def test_a_broken_tool_is_caught(broken, message):
    tool = Upper()
    vars(tool).update(broken)
    with pytest.raises(AssertionError, match=message):
        check_tool(tool, GOOD, BAD)


class Quick(Upper):
    """Has little time."""

    timeout_s = 0.5


LEFT = threading.Event()
"""Set when the tests of this module are over, so that no thread is left for ever."""


@pytest.fixture(autouse=True, scope="module")
def _leave():
    yield
    LEFT.set()


def never():
    LEFT.wait(60)


class Sleeps(Quick):
    def run(self, calls):
        never()


def test_a_tool_that_hangs_fails_in_its_time():
    before = time.monotonic()
    message = r"^tool 'upper' \(Sleeps\) did not answer to run on upper .* within timeout_s = 0.5"
    with pytest.raises(AssertionError, match=message):
        check_tool(Sleeps(), GOOD)
    assert time.monotonic() - before < 5


@pytest.mark.parametrize(
    "limit", [0, -1, math.inf, math.nan, pytest.param(10**400, id="10**400"), "60", None]
)
def test_a_tool_has_a_number_of_seconds(limit):
    tool = Upper()
    tool.timeout_s = limit
    with pytest.raises(AssertionError, match=r"Upper\.timeout_s is .*: give a number of seconds"):
        check_tool(tool, GOOD)


def fails(*_):
    raise ValueError("no")


class Aimed(Stateful, Upper):
    """Opens a session for the goal of a question."""

    def open(self, question):
        return Aim(question.metadata["goal"])

    def run(self, calls):
        assert {call.session.goal for call in calls} == {"north"}
        return Upper.run(self, calls)


class Aim(ToolSession):
    def __init__(self, goal):
        self.goal = goal


def test_check_tool_opens_sessions_for_a_custom_question():
    question = Question("north", "Where to?", ("north",), {"goal": "north"})
    check_tool(Aimed(), GOOD, BAD, question=question)
    message = (
        r"^tool 'upper' \(Aimed\) raised KeyError: 'goal' in open for question 'q' \(its columns"
    )
    with pytest.raises(AssertionError, match=message):
        check_tool(Aimed(), GOOD)


def test_check_tool_reports_faults_found_before_the_first_call():
    with pytest.raises(AssertionError, match="give check_tool a good call of Upper"):
        check_tool(Upper(), [])
    tool = Upper()
    tool.check = fails
    with pytest.raises(AssertionError, match=r"^Upper\.check\(\) raised ValueError: no$") as raised:
        check_tool(tool, GOOD)
    assert isinstance(raised.value.__cause__, ValueError)
    tool = Upper()
    tool.parameters = {"type": "object", "properties": 7}
    message = r"^tool 'upper' \(Upper\) has parameters that are no JSON Schema: 7 is not of type"
    with pytest.raises(AssertionError, match=message):
        check_tool(tool, GOOD)


class Plain(Segmenter):
    """The whole text is the answer."""

    max_turns = 1

    def prompt(self, question, tools):
        return [{"role": "user", "content": question.text}]

    def read(self, text, turn, cut):
        return Reading(format_error="cut short") if cut else Reading(answer=text)

    def observe(self, reading, results):
        shown = "".join(result.content for result in results)
        return [{"role": "user", "content": shown or "answer"}]


def test_a_good_segmenter_passes():
    check_segmenter(Plain())


CALL = Reading((ToolCall("x"),))


def calls(text, turn, cut):
    return CALL


def alternates():
    answers = itertools.cycle("ab")
    return lambda text, turn, cut: Reading(answer=next(answers))


def shows(text, role="user"):
    return lambda reading, results: [{"role": role, "content": text}]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"max_turns": 0}, "max_turns is 0"),
        (
            {"stop": "</answer>"},
            "Plain.stop and Plain.tags must be tuples of texts, not '</answer>'",
        ),
        ({"stop": ("</answer>",)}, "'answer' must be in its tags"),
        (
            {"prompt": lambda question, tools: [{"role": "system", "content": question.text}]},
            "must end with the user's message",
        ),
        (
            {"prompt": lambda question, tools: [{"role": "user", "content": "?"}]},
            "leaves the question out",
        ),
        (
            {"read": lambda text, turn, cut: Reading(answer=text[0])},
            r"^Plain\.read\('', 0, cut=False\) raised IndexError",
        ),
        ({"read": lambda text, turn, cut: None}, "which is not a Reading"),
        ({"read": lambda text, turn, cut: Reading()}, "needs a format_error"),
        ({"read": lambda text, turn, cut: Reading((ToolCall(""),))}, "neither name nor error"),
        (
            {"read": lambda text, turn, cut: Reading(answer=text)},
            r"cut=True\) takes the answer '.*' from what was cut: the whole, '.*', answers '",
        ),
        ({"read": calls, "observe": lambda reading, results: []}, "messages of role user or tool"),
        ({"read": calls, "observe": shows("x", "assistant")}, "messages of role user or tool"),
        (
            {"read": calls, "observe": shows("...")},
            "must show each result as it is",
        ),
        ({"tags": ("answer",)}, "takes plain text for a well-formed turn"),
        ({"read": lambda text, turn, cut: Reading(answer=7)}, "answer is not text"),
        ({"read": lambda text, turn, cut: Reading(("x",))}, "'x' is no ToolCall"),
        (
            {"read": lambda text, turn, cut: Reading((ToolCall("x", []),))},
            "arguments are not a mapping",
        ),
        ({"read": alternates()}, "and the second time"),
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


PAPER = [ToolExecuted(), AnswerRetrieved(), AnswerPresent(), ExactMatch(), WellFormed()]
OUTCOME = [AnswerPresent(), ExactMatch(), WellFormed()]


@pytest.mark.parametrize("rewards", [
    [FirstHit(), *OUTCOME], [FirstHit(), SearchCost(), ExactMatch()], [Repetition(), *OUTCOME],
    [Progress(AnswerSeen()), Progress(SupportSeen()), *OUTCOME], [FirstHit(), F1(), WellFormed()],
    [*PAPER, SearchCost()], [*PAPER, Repetition(0.7)], OUTCOME,
    *([reward] for reward in (*OUTCOME, FirstHit(), F1(), SearchCost(), Repetition(), Right())),
])  # fmt: skip
@pytest.mark.parametrize("turns", [2, 4, 8])
def test_no_hack_pays_as_much_as_a_correct_answer_by_safe_rewards(rewards, turns):
    if rewards[0] in PAPER[:2] and turns == 8:
        rewards = [*rewards, Repetition(0.7)]  # a search costs less than 0.7 until the eighth
    check_hacks(rewards, turns)


def test_the_papers_rewards_are_safe_for_two_turns_alone():
    check_hacks(PAPER, 2)
    message = (
        r"the same search in every turn, and a wrong answer earns 3\.2, and an honest .* 2\.6\."
    )
    with pytest.raises(AssertionError, match=message):
        check_hacks(PAPER, 5)


@pytest.mark.parametrize(("score", "hack"), [
    (lambda t: 0.1 * len(t.turns), "the same search in every turn"),
    (lambda t: float(t.answer in ("Europe/Amsterdam", "\u200b")), "an answer that nobody can see"),
    (lambda t: float("Europe/Amsterdam" in (t.answer or "")), "many candidates"),
    (lambda t: float(sum("Amsterdam" in r.content for r in t.results)), "the same search in every"),
    (lambda t: 1.0 * (t.answer == "Europe/Amsterdam") + 2.0 * any(not r.ok for r in t.results),
     "failed calls"),
])  # fmt: skip
def test_a_reward_that_can_be_hacked_is_caught(score, hack):
    body = {"score": lambda self, trajectory: score(trajectory), "right_at": 0.9}
    with pytest.raises(AssertionError, match=hack):
        check_hacks(type("Odd", (OutcomeReward,), body)())


def test_hacks_of_every_kind_are_at_most_as_long_as_the_turns():
    for turns in (2, 3, 7):
        hacks = hacked_trajectories(turns)
        assert len(hacks) >= 20
        assert max(len(hack.turns) for hack in hacks.values()) == turns
    assert not any(compute_curves(hack)["exact_match"] for hack in hacks.values())


def test_the_table_of_hacks_on_the_page_is_what_they_earn():
    page = (Path(__file__).parents[1] / "docs/explanation/turns.md").read_text("utf-8")
    columns = [PAPER, [*PAPER, Repetition()], [*PAPER, SearchCost()], [FirstHit(), *OUTCOME]]
    attempts = {"an honest correct answer after one search": make_trajectory(SEARCHED, RIGHT)}
    attempts |= hacked_trajectories(4)
    rows = re.findall(
        r"^\| (.*?) \| ([-\d.]+) \| ([-\d.]+) \| ([-\d.]+) \| ([-\d.]+) \|$", page, re.M
    )
    assert len(rows) >= 5
    for name, *shown in rows:
        earned = [float(score_group([attempts[name]], rewards).totals[0]) for rewards in columns]
        assert [float(cell) for cell in shown] == pytest.approx(earned, abs=0.0051), name


@pytest.mark.parametrize("reward", [Right, Calls])
def test_a_good_reward_passes(reward):
    check_reward(reward())


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (
            lambda trajectory: math.nan,
            r"^Right.score\('right after a search'\) gives nan, which is not a finite n",
        ),
        (lambda trajectory: 10**400, "gives 10+, which is not a finite number"),
        (lambda trajectory: float(trajectory.answer is None), "pays for garbage, .*'garbage': 1.0"),
        (
            lambda trajectory: float("Euro" in trajectory.turns[0].text),
            "pays for garbage, which may earn nothing: {'garbage that names the answer': 1.0}",
        ),
        (lambda trajectory, seen=[]: float(len(seen.append(1) or seen)), "the second time"),
    ],
)
def test_a_broken_reward_is_caught(score, message):
    reward = Right()
    reward.score = score
    with pytest.raises(AssertionError, match=message):
        check_reward(reward)


def test_a_reward_that_raises_is_reported_with_the_trajectory_and_turn():
    right, calls = Right(), Calls()
    right.score = lambda trajectory: 1 / len(trajectory.results)
    message = r"^Right\.score\('right without a search'\) raised ZeroDivisionError: "
    with pytest.raises(AssertionError, match=message) as raised:
        check_reward(right)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    calls.score = lambda trajectory, turn: 1 / len(trajectory.turns[turn].results)
    message = r"^Calls\.score\('right after a search', 1\) raised ZeroDivisionError: "
    with pytest.raises(AssertionError, match=message):
        check_reward(calls)


def test_a_reward_must_have_one_kind_and_a_lower_case_name():
    class Both(OutcomeReward, TurnReward):
        def score(self, trajectory, turn=0):
            return 0.0

    with pytest.raises(AssertionError, match="Both must extend either TurnReward or OutcomeReward"):
        check_reward(Both())
    right = Right()
    right.name = "Is right"
    with pytest.raises(AssertionError, match=r"Right\.name is 'Is right': use lower case"):
        check_reward(right)


# ------------------------------------------------------------------- estimators


class Centred(AdvantageEstimator):
    """The outcome less its mean, or what a test gives."""

    min_group_size = 2

    def __init__(self, estimate=None):
        self.estimate = estimate or centred

    def __call__(self, group):
        return self.estimate(group)


def centred(group):
    return (group.outcome - group.outcome.mean())[:, None] * group.reached


def by_its_trajectories(group):
    """The longest attempts get 1."""
    taken = torch.tensor([len(t.turns) for t in group.trajectories])
    assert bool((taken == group.reached.sum(1)).all())
    assert len({t.turns[0].text for t in group.trajectories}) == len(taken)
    return (taken == taken.max())[:, None] * group.reached.float()


def by_its_components(group):
    turns = group.components["turn/b"].values + group.components["turn/cost"].values
    assert turns.float().equal(group.turn_rewards)
    assert group.turn_costs.equal(group.components["turn/cost"].values.float())
    total = sum(group.component_totals.values()).float()
    assert torch.allclose(total, group.totals)
    return (total - total.mean())[:, None] * group.reached


@pytest.mark.parametrize(
    "estimator",
    [
        OutcomeOnly(),
        Merged(min_std=1e-4),
        TurnLevel(),
        TurnLevel(gamma=0.9),
        TurnLevel(gamma=0, baseline="leave_one_out"),
        TurnLevel(baseline="leave_one_out", scale="none"),
        Centred(),
        Centred(by_its_trajectories),
        Centred(by_its_components),
        Centred(lambda group: group.reached.double()),
    ],
)
def test_a_good_estimator_passes(estimator):
    check_estimator(estimator)


def overwrites(name):
    def estimate(group):
        advantages = centred(group)
        getattr(group, name)[0] = 1
        return advantages

    return estimate


def counts():
    numbers = itertools.count(1)
    return lambda group: centred(group) * next(numbers)


@pytest.mark.parametrize(
    ("estimate", "message"),
    [
        (
            lambda group: group.rewards,
            r"^Centred on a group of shape \(2, 1\) \(turns taken \[1, 1\], outcome and turn "
            r"rewards \[\[.*\]\]\) raised AttributeError: 'Group' object has no attribute",
        ),
        (lambda group: group.reached.long(), "neither a float tensor of that shape"),
        (lambda group: group.outcome, "neither a float tensor of that shape"),
        # all alike: 0 / 0
        (
            lambda group: centred(group) / (group.totals - group.totals.mean()).abs().sum(),
            r"rewards \[\[0.5, 0.5\], \[0.5, 0.5\]\]\) gives \[\[nan\], \[nan\]\], which is not f",
        ),
        # alone at a turn: sum / (n - 1) is 0 / 0
        (
            lambda group: (centred(group) / (group.reached.sum(0) - 1)).where(group.reached, 0),
            r"\(turns taken \[(2, 1|1, 2)\], .* gives .*, which is not finite",
        ),
        (lambda group: centred(group) + 1, "not zero where not reached"),
        (overwrites("outcome"), "changes outcome of the group"),
        (counts(), r"gives \[.*\], and the second time \[\["),
        # better than the one before it: a rotation of the group would not show it
        (
            lambda group: (group.outcome - group.outcome.roll(1))[:, None] * group.reached,
            r"gives \[.*, and \[.* to its members in the order \[",
        ),
        (lambda group: centred(group) * torch.arange(len(group.outcome))[:, None], "in the order"),
    ],
)
def test_a_broken_estimator_is_caught(estimate, message):
    with pytest.raises(AssertionError, match=message):
        check_estimator(Centred(estimate))


def test_an_estimator_is_checked_with_its_minimum_group_size_and_larger_ones():
    sizes = set()

    def estimate(group):
        sizes.add(len(group.trajectories))
        return centred(group) / (len(group.trajectories) - least + 1)

    estimator = Centred(estimate)
    estimator.min_group_size = least = 5
    check_estimator(estimator)
    assert min(sizes) == 5
    assert len(sizes) == 3
    # sum / (G - 1) of one trajectory is 0 / 0
    estimator.min_group_size, least = 1, 2
    with pytest.raises(AssertionError, match=r"a group of shape \(1, 1\) .*not finite"):
        check_estimator(estimator)
    estimator.min_group_size = 0
    with pytest.raises(AssertionError, match=r"Centred\.min_group_size is 0"):
        check_estimator(estimator)


# ------------------------------------------------------------------- sources


def ask(number, *answers, text="The capital of country {}?"):
    known = {"answers": answers} if answers else {}
    return Question(number, text.format(number), **known)


class Capitals(QuestionSource):
    """Questions to train on and to evaluate with, one without an answer, and a corpus."""

    def questions(self, split):
        splits = {
            "train": [ask("1", "Paris"), ask("2", "Rome", "Roma"), ask("3")],
            "val": [ask("1", "Bern")],
        }
        if split not in splits:
            raise DataError(f"no split {split!r}, only {', '.join(splits)}")
        return splits[split]

    def passages(self):
        return iter([Passage("a", "Paris", "Paris is a city."), Passage("b", "", "Rome is one.")])


class OneSplit(Capitals):
    """Questions to evaluate with, one by one, and no corpus."""

    default_splits = {"train": None, "val": ""}
    uses = ("fields",)

    def questions(self, split):
        if split:
            raise DataError("this is one split")
        yield ask("1", "Bern")

    def passages(self):
        raise DataError("no corpus")
        yield


@pytest.mark.parametrize(
    "source", [Capitals(), OneSplit(), Atlas(), GivenQuestions([ask("1", "Bern")])]
)
def test_a_good_source_passes(source):
    check_source(source)


def test_a_file_of_questions_passes(tmp_path):
    path = tmp_path / "capitals.jsonl"
    path.write_text('{"id": "1", "question": "The capital of France?", "answers": ["Paris"]}\n')
    check_source(open_source(str(path)))


def gives(*questions):
    """The same questions for every split that there is."""
    return lambda split: (Capitals().questions(split), iter(questions))[1]


def by_turns():
    """The questions in the one order and in the other."""
    orders = itertools.cycle([1, -1])
    return lambda split: Capitals().questions(split)[:: next(orders)]


def knows_every_split(split):
    return Capitals().questions("val" if split == "val" else "train")


def lists_no_splits(split):
    if split not in ("train", "val"):
        raise DataError("only train")
    return Capitals().questions(split)


def breaks_off():
    yield Passage("a", "", "Paris is a city.")
    raise KeyError("text")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"uses": "fields"}, r"Capitals\.uses is 'fields': give a tuple"),
        ({"default_splits": {"train": "train"}}, "default_splits is .*name one for 'train'"),
        (
            {"default_splits": {"train": "train", "val": "test"}},
            r"Capitals\.questions\('test'\) raised DataError: no split 'test', only train, val",
        ),
        ({"questions": gives()}, r"questions\('train'\) gives nothing"),
        ({"questions": gives({"id": "1"})}, r"gives \{'id': '1'\}: a Question has an id"),
        (
            {"questions": gives(ask("1", "x", text=" "))},
            "gives .*: a Question has an id and a text",
        ),
        # both normalise to nothing
        ({"questions": gives(ask("1", "The"), ask("2", "?"))}, "none that has an answer to match"),
        (
            {"questions": gives(ask("1", "x"), ask("1", "y"))},
            r"gives one id to Question\(id='1'.*'x'.* and to Question\(id='1'.*'y'",
        ),
        ({"questions": by_turns()}, r"gives \('1', .* and the second time \('3', "),
        (
            {"questions": knows_every_split},
            r"split'\) gives 3, and no DataError",
        ),
        (
            {"questions": lists_no_splits},
            r"DataError\('only train'\), which does not list the splits .*: \['train', 'val'\]",
        ),
        ({"passages": lambda: []}, r"Capitals\.passages\(\) gives nothing"),
        ({"passages": lambda: [Passage("a", "", "x"), Passage("a", "", "y")]}, "gives one id to"),
        ({"passages": breaks_off}, r"Capitals\.passages\(\) raised KeyError: 'text'"),
    ],
)
def test_a_broken_source_is_caught(broken, message):
    source = Capitals()
    vars(source).update(broken)
    with pytest.raises(AssertionError, match=message):
        check_source(source)


def test_a_corpus_is_not_read_to_its_end():
    source = Capitals()
    source.passages = lambda: (Passage(str(i), "", "text") for i in itertools.count())
    check_source(source)


# ------------------------------------------------------------------- the scripted engine


@pytest.fixture
def scripted(tiny_model):
    tokenizer = Policy(str(tiny_model)).build().tokenizer

    def make(says):
        engine = ScriptedEngine(tokenizer, says)
        engine.start(None, 64)
        engine.sync(1)
        return engine, lambda text: tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    return make


def test_a_scripted_engine_samples_the_text_given_for_its_session_and_turn(scripted):
    engine, ids = scripted(lambda number, turn: f"{number} in {turn}")

    async def scenario():
        root = engine.open([1, 2])
        unused, fork = root.fork(), root.fork()
        root.close()
        first = await fork.generate([], Sampling(99))
        branch = fork.fork()
        await fork.generate([7], Sampling(99))
        await branch.generate([8], Sampling(99))
        assert len(engine.open_sessions) == 3
        for session in (unused, fork, branch):
            session.close()
        return first

    first = asyncio.run(scenario())
    assert first.token_ids == ids("1 in 0")
    assert (len(first.logprobs), first.reason) == (len(first.token_ids), "stop")
    assert [number for number, *_ in engine.asked] == [1, 1, 2]
    sampled = [1, 2, *ids("1 in 0")]
    assert [history for _, history, _ in engine.asked] == [[1, 2], [*sampled, 7], [*sampled, 8]]
    assert not engine.open_sessions
