"""Environments: what an attempt reads and earns in one, and the mistakes of users that are refused.

Time limits, random numbers and the queue are in `test_environment_limits`.
"""

from __future__ import annotations

import functools
import random
import re
import signal
import sqlite3
import time
import zlib

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rollouts import SEEDED, Guess, Look, Room, play, play_episode, room, rooms
from runs import data, make_module, trainer
from turnrl import (
    DataError,
    PolicyMistake,
    Question,
    Reading,
    RecipeError,
    Rollout,
    ToolCall,
    ToolError,
    ToolResult,
    load_questions,
    score_group,
)
from turnrl.agent.capacity import Shares
from turnrl.agent.running import on_loop
from turnrl.data.fields import Fields
from turnrl.plugin.errors import TrajectoryLost
from turnrl.testing import ScriptedEngine, check_reward, check_source, check_tool
from turnrl_environments import (
    Environment,
    EnvironmentOutcome,
    EnvironmentReward,
    Gymnasium,
    Seeds,
    StepCost,
)
from turnrl_environments.world import question_seed
from turnrl_estimators import Branched
from turnrl_segmenters import Action, ReAct, SearchR1, TwoTurn

__all__ = ["rooms"]  # fixtures

WAYS = ["left", "down", "right", "up"]
SCHEDULE = {"is_slippery": False, "reward_schedule": [10, -1, -0.1]}


def lake(**options):
    return Gymnasium("FrozenLake-v1", {**SCHEDULE, **options}, WAYS)


# ------------------------------------------------------------------------- Gymnasium


def test_an_attempt_earns_gymnasiums_rewards_and_ends_when_it_does(chat):
    route = ["down", "Down", "right", "right", "down", "right", "left"]
    trajectory = play_episode(chat, lake(), route)
    assert trajectory.ended_by == "tool"
    env = gymnasium.make("FrozenLake-v1", **SCHEDULE)
    seen = [env.reset(seed=0)[0]]
    for turn, word in zip(trajectory.turns, route, strict=False):
        cell, pays, *_ = env.step(WAYS.index(word.lower()))
        seen.append(cell)
        assert turn.reward == pytest.approx(float(pays))
    assert [turn.reward for turn in trajectory.turns] == pytest.approx([-0.1] * 5 + [10])
    shown = chat.tokenizer.decode(trajectory.sample.token_ids)
    assert "Go.\n\n0<|im_end|>" in shown  # the first observation stands below the question
    read = [turn.results[0].content for turn in trajectory.turns]
    assert read == [*map(str, seen[1:-1]), ""]  # nobody reads after the end
    assert trajectory.figures == {
        "steps": 6,
        "earned": pytest.approx(9.5),
        "ended": 1,
        "truncated": 0,
    }


def test_the_action_of_the_last_turn_is_taken(chat):
    trajectory = play_episode(chat, lake(), ["down", "down", "right"], turns=3)
    assert trajectory.ended_by == "turns"
    assert [turn.reward for turn in trajectory.turns] == pytest.approx([-0.1] * 3)
    assert trajectory.figures["steps"] == 3


class Step(Look):
    acts = True

    def run(self, calls):
        return [ToolResult("went on", reward=1.0) for _ in calls]


@pytest.mark.parametrize(
    "scheme", [ReAct(2), ReAct(3, think="required"), SearchR1(2, tool="look"), TwoTurn()]
)
def test_every_turn_scheme_runs_a_call_of_the_last_turn_that_acts(chat, scheme):
    """And no other call: nobody would read its result."""
    turns, call = scheme.max_turns, "<think>I look.</think><search>x</search>"
    if not isinstance(scheme, SearchR1):
        call = scheme.write(Reading((ToolCall("look", {"query": "x"}),)))
    engine = ScriptedEngine(chat.tokenizer, lambda member, turn: call)
    paid = {}
    for kind in (Step, Look):
        rollout = Rollout(scheme, [kind(lambda query: "found")], max_tokens=8000)
        ((trajectory,),) = rollout.play(engine, chat, [SEEDED], 1, (0,))
        assert (trajectory.ended_by, len(trajectory.turns)) == ("turns", turns)
        assert trajectory.turns[-1].reading.format_error
        paid[kind] = [turn.reward for turn in trajectory.turns]
        assert len(trajectory.turns[-1].reading.calls) == (kind is Step)
    assert paid == {Step: [1.0] * turns, Look: [0.0] * turns}


def test_a_text_that_is_no_action_gets_an_error_and_takes_no_step(chat):
    trajectory = play_episode(chat, lake(), ["fly", "", "down"], turns=3)
    fly, nothing, down = trajectory.turns
    assert "'fly' is not one of ['left'" in fly.results[0].content
    assert (fly.reward, nothing.reward) == (0, 0)
    assert nothing.reading.format_error == "no action"
    assert trajectory.figures["steps"] == 1
    assert down.reward == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("name", "drawn"),
    [("FrozenLake", "[S]FFF"), ("Taxi", "+---------+"), ("CliffWalking", "o  o  o")],
)
def test_ansi_renderings_of_gymnasium_are_the_observations(chat, name, drawn):
    newest = max(spec.version for spec in gymnasium.registry.values() if spec.name == name)
    tool = Gymnasium(f"{name}-v{newest}", {"render_mode": "ansi"})
    trajectory = play_episode(chat, tool, ["0", "1"], turns=2)
    first = chat.tokenizer.decode(trajectory.sample.prompt_ids)
    assert drawn in first
    assert "\x1b" not in first
    assert trajectory.figures["steps"] == 2
    check_tool(tool, [{"action": 0}], [{"action": 9}, {"action": "0"}, {}], SEEDED)


def test_a_users_observe_function_writes_what_the_policy_reads(chat):
    tool = Gymnasium("FrozenLake-v1", SCHEDULE, WAYS, observe=lambda cell: f"row {cell // 4}")
    trajectory = play_episode(chat, tool, ["down"], turns=1)
    assert "Go.\n\nrow 0" in chat.tokenizer.decode(trajectory.sample.prompt_ids)
    assert trajectory.turns[0].results[0].unread == "row 1"
    tool = Gymnasium("FrozenLake-v1", SCHEDULE, WAYS, observe=lambda cell: cell)
    message = "environment FrozenLake-v1: observe, after reset returned 0"
    with pytest.raises(ToolError, match=message):
        play_episode(chat, tool, ["down"])


def test_a_branch_continues_on_its_own_from_its_turn(chat):
    attempts = play(
        chat, lake(), lambda session, turn: "right" if session else "down", turns=2, probes=1
    )
    ((trunk,),), (probes,), _ = attempts
    cells = [probe.trajectory.results[-1].unread for probe in probes]
    assert trunk.results[-1].unread == "8"
    assert cells == ["2", "5"]  # right twice; down, then right
    assert all(probe.trajectory.figures["steps"] == 2 for probe in probes)


def test_a_class_with_reset_and_step_needs_no_gymnasium(chat, rooms):
    trajectory = play_episode(chat, room(), ["look around", "open it"], turns=2)
    assert trajectory.turns[0].results[0].content == "look around, 1"
    assert [turn.reward for turn in trajectory.turns] == [1, 1]
    assert rooms[-1].seed == 0
    assert [each.closed for each in rooms] == [1, 1]  # the first was made to see its actions
    assert room().specs[0].parameters["properties"]["action"]["type"] == "string"


class Dial(gymnasium.Env):
    """A number that is turned to."""

    def __init__(self, space):
        self.action_space = space
        self.observation_space = spaces.Discrete(1)

    def reset(self, *, seed=None, options=None):
        return f"{options}", {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return str(action), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("space", "words", "schema", "good", "wrong"),
    [
        (spaces.Discrete(3), None, {"type": "integer", "minimum": 0, "maximum": 2}, "2", "3"),
        (spaces.Discrete(2, start=5), ["a", "b"], {"type": "string", "enum": ["a", "b"]}, "B", "5"),
        (
            spaces.Box(-1, 1, (), np.float32),
            None,
            {"type": "number", "minimum": -1, "maximum": 1},
            "0.5",
            "1.5",
        ),
        (spaces.Box(-np.inf, np.inf, (1,)), None, {"type": "number"}, "-7", "seven"),
        (spaces.Text(4, charset="abcd"), None, {"type": "string", "maxLength": 4}, "abba", "abbab"),
    ],
)
def test_an_action_may_be_a_number_a_text_or_one_of_a_list(chat, space, words, schema, good, wrong):
    tool = Gymnasium(make=Dial, options={"space": space}, actions=words)
    assert tool.specs[0].parameters["properties"]["action"] == schema
    trajectory = play_episode(chat, tool, [good, wrong], turns=2)
    assert [turn.results[0].ok for turn in trajectory.turns] == [True, False]


def test_the_options_of_a_question_reach_reset(chat):
    question = Question("q", "Go.", metadata={"options": {"level": 2}})
    tool = Gymnasium(make=Dial, options={"space": spaces.Discrete(2)})
    trajectory = play_episode(chat, tool, ["0"], turns=1, questions=[question])
    assert "{'level': 2}" in chat.tokenizer.decode(trajectory.sample.prompt_ids)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "Gymnasium takes an id, such as FrozenLake-v1, or a function in make"),
        ({"id": "FrozenLak-v1"}, "FrozenLak-v1 cannot be made .* Did you mean: `FrozenLake`"),
        ({"id": "FrozenLake-v1", "options": {"ice": 1}}, r"with the options \{'ice': 1\}"),
        ({"id": "FrozenLake-v1", "actions": ["l", "r"]}, r"names 2 actions \(l, r\), .* has 4"),
        ({"id": "FrozenLake-v1", "capacity": 0}, "capacity is 0; it must be at least 1"),
        ({"id": "FrozenLake-v1", "step_timeout_s": "1"}, "step_timeout_s is the string '1'"),
        ({"make": "lakes"}, "Gymnasium.make is 'lakes', which is not a path"),
        ({"make": "lakes.make"}, "Gymnasium.make is 'lakes.make', which cannot be imported"),
        ({"make": "math.pi"}, "Gymnasium.make is 'math.pi', which cannot be called"),
        (
            {"make": Dial, "options": {"space": spaces.MultiBinary(3)}},
            "the actions of .* are a MultiBinary, and a policy can give a text, a number or one of",
        ),
        ({"make": Dial, "options": {"space": spaces.Box(0, 1, (2,))}}, "are a Box, and"),
        (
            {"make": Dial, "options": {"space": spaces.Box(0, 1, ())}, "actions": ["a"]},
            "Gymnasium.actions names actions, and those of .* are a Box. Leave it out",
        ),
    ],
)
def test_impossible_settings_are_refused_with_the_next_step(settings, message):
    with pytest.raises(RecipeError, match=message):
        Rollout(Action(), [Gymnasium(**settings)])


# ------------------------------------------------------------------------- errors


@pytest.mark.parametrize("reward", [None, "good", float("nan")])
def test_a_reward_that_is_not_a_finite_number_stops_the_run(chat, rooms, reward):
    message = f"gave the reward {reward!r} from step. Return a finite number"
    with pytest.raises(ToolError, match=message):
        play(chat, room(step=("x", reward, False, False, {})), ["look"], size=2)
    assert [each.closed for each in rooms] == [1] * len(rooms)


def test_an_environment_that_always_raises_stops_the_run_after_its_restarts(chat, rooms):
    def breaks(room, action):
        raise OSError("the door is stuck")

    lost = r"in step raised OSError: the door is stuck \(test_.*\d+\). An attempt begins"
    with pytest.raises(TrajectoryLost, match=lost):
        play(chat, room(step=breaks), ["look"], max_restarts=2)
    assert [each.closed for each in rooms] == [1] * 4  # one to see its actions, three attempts

    def shut():
        raise OSError("only one game at a time")

    lost = "in reset raised OSError: only one .*, or set its capacity"
    with pytest.raises(TrajectoryLost, match=lost):
        play(chat, room(reset=shut), ["look"])


def test_an_environment_that_hangs_loses_only_its_own_attempt(chat):
    hung = []

    def hangs(room, action):
        if action == "wait" and not hung:
            hung.append(room)
            time.sleep(30)
        return "x", 0.0, False, False, {}

    tool = Gymnasium(make=Room, options={"step": hangs}, step_timeout_s=0.2)
    began = time.perf_counter()
    attempts = play(chat, tool, ["look", "wait"], size=4, turns=3)
    assert time.perf_counter() - began < 10
    assert attempts.restarted == 1
    assert [len(t.turns) for t in attempts.trajectories[0]] == [3] * 4
    message = r"in step took longer than step_timeout_s = 0.2. Raise it"
    hung.clear()
    with pytest.raises(TrajectoryLost, match=message):
        play(chat, tool, ["wait"], max_restarts=0)


# ------------------------------------------------------------------------- rewards


def scored(chat, says, *rewards, **options):
    """Turn rewards and outcomes of attempts on the lake, one for each script."""
    scripts = [says] if isinstance(says[0], str) else says
    attempts = [play_episode(chat, lake(), script, **options) for script in scripts]
    group = score_group(attempts, list(rewards))
    return group.turn_rewards.tolist(), group.outcome.tolist()


GOAL = ["down", "down", "right", "right", "down", "right"]


def test_steps_pay_and_other_endings_and_idle_turns_cost(chat):
    ends, outcome = scored(chat, GOAL, EnvironmentReward())
    assert ends == [pytest.approx([-0.1] * 5 + [10])]
    assert outcome == [0]
    # nothing and nonsense are idle; so is the last turn here, and no environment ended it
    late, _ = scored(chat, ["down", "", "fly", "fly"], EnvironmentReward(), turns=4)
    assert late == [pytest.approx([-0.1, -0.1, -0.1, -1.1])]
    (long,), _ = scored(
        chat, ["down", "down " * 30], EnvironmentReward(2.0, 0.5, 3.0), max_turn_tokens=10
    )
    assert long == pytest.approx([-0.2, -3.5])


def test_the_last_step_is_the_outcome_if_the_recipe_says_so(chat):
    rewards = (EnvironmentReward(last_step=False), EnvironmentOutcome(0.5, "last_step"))
    scripts = [GOAL, ["left"] * 6]
    turns, outcome = scored(chat, scripts, *rewards, turns=6)
    assert turns[0] == pytest.approx([-0.1] * 5 + [0])
    assert turns[1] == pytest.approx([-0.1] * 5 + [-1.1])
    assert outcome == [5, 0]


def test_each_step_costs_and_the_attempts_that_reach_the_goal_are_right(chat):
    outcome = EnvironmentOutcome(0.5, "last_step", right_at=5.0)
    rewards = [EnvironmentReward(last_step=False), outcome, StepCost(0.2)]
    attempts = [
        play_episode(chat, lake(), says, turns=7) for says in (GOAL, ["left", "fly", "left"])
    ]
    group = score_group(attempts, rewards)
    steps = [int(attempt.figures["steps"]) for attempt in attempts]
    assert steps[0] == 6
    assert group.cost_names == ("turn/step_cost",)
    assert group.turn_costs.sum(1).tolist() == pytest.approx([-0.2 * n for n in steps])
    assert float(group.turn_costs[1, 1]) == 0  # "fly" is no step
    assert group.right.tolist() == [True, False]
    assert EnvironmentOutcome().right_at is None
    check_reward(StepCost())
    with pytest.raises(RecipeError, match="weight is -1; it must be at least 0"):
        StepCost(-1)


def test_an_outcome_that_no_environment_gives_is_refused(chat):
    with pytest.raises(RecipeError, match=r"no environment of the recipe has it. Add 'def get_rew"):
        scored(chat, GOAL, EnvironmentOutcome())
    with pytest.raises(RecipeError, match=r"EnvironmentOutcome.of is 'end'; choose one of get_rew"):
        EnvironmentOutcome(of="end")
    with pytest.raises(RecipeError, match="idle is -1; it must be at least 0"):
        EnvironmentReward(idle=-1)
    check_reward(EnvironmentReward())
    check_reward(EnvironmentOutcome(of="last_step"))


def test_seeds_make_tasks_without_a_file(chat):
    source = Seeds(5, 3, "Reach G.")
    train, val = (load_questions(source, split) for split in ("train", "val"))
    assert [question.metadata["seed"] for question in train] == [0, 1, 2, 3, 4]
    assert len(val) == 3
    assert {question.text for question in train} == {"Reach G."}
    seeds = [{q.metadata["seed"] for q in load_questions(Seeds(), s)} for s in ("train", "val")]
    assert not seeds[0] & seeds[1]
    check_source(Seeds())
    for wrong in ({"count": 0}, {"val_count": 1.5}, {"text": " "}, {"count": 2 * 10**9}):
        with pytest.raises(ValueError, match=r"Seeds"):
            Seeds(**wrong)
    with pytest.raises(ValueError, match="Seeds has no split 'test'; it has train and val"):
        source.questions("test")


def test_a_call_after_the_end_does_nothing():
    tool = lake()

    async def walks():
        walk = await tool.open(SEEDED)
        calls = [ToolCall("step", {"action": way}, session=walk) for way in [*GOAL, "left"]]
        results = await tool.run(calls)
        return results, await walk.close()

    results, figures = on_loop(walks())
    assert [result.done for result in results] == [False] * 5 + [True] * 2
    assert results[-1] == ToolResult(
        "the environment has ended, so nothing was done", ok=False, done=True
    )
    assert figures["steps"] == 6


# ------------------------------------------------------------------------- classes of users


def guesses(chat, *numbers):
    """An attempt that makes these guesses."""
    tool = Environment(Guess)
    return play_episode(chat, tool, numbers, turns=len(numbers), tool_name="guess")


def test_a_class_of_the_user_is_an_environment(chat):
    number = random.Random(0).randint(0, 9)
    trajectory = guesses(chat, "12", str((number + 1) % 10), str(number), "0")
    assert "Go.\n\nA number from 0 to 9." in chat.tokenizer.decode(trajectory.sample.prompt_ids)
    large, wrong, right = trajectory.turns
    assert (large.results[0].content, large.results[0].ok) == ("too large", False)
    assert [large.reward, wrong.reward, right.reward] == pytest.approx([0, -0.1, 0.9])
    assert trajectory.ended_by == "tool"
    assert trajectory.figures["outcome"] == 0.5
    group = score_group([trajectory], [EnvironmentReward(), EnvironmentOutcome(2.0)])
    assert group.turn_rewards[0].tolist() == pytest.approx([-0.1, -0.1, 0.9])
    assert group.outcome.tolist() == [1.0]


class Countdown:
    """Takes numbers off a list that the data give."""

    def reset(self, numbers: list) -> str:
        self.numbers = numbers
        return str(numbers)

    def take(self, n: int) -> ToolResult:
        """Take a number."""
        self.numbers.remove(n)
        return ToolResult(str(self.numbers), done=not self.numbers)


def test_an_attempt_cannot_change_the_columns_of_another(chat):
    question = Question("c", "Go.", metadata={"numbers": [1, 2]})
    tool = Environment(Countdown)
    (group,), *_ = play(chat, tool, "12", [question], size=2, turns=2, tool_name="take")
    assert [attempt.turns[0].results[0].content for attempt in group] == ["[2]", "[2]"]
    assert question.metadata == {"numbers": [1, 2]}


def test_reset_gets_the_columns_that_fields_name_as_answers_by_their_own_names():
    class Shown(Countdown):
        def reset(self, solution, answers, level=3) -> str:
            return f"{solution} {answers} {level}"

    rows = [{"prompt": "Go.", "solution": 7, "level": None}]
    (question,) = load_questions(rows, fields=Fields(None, "prompt", "solution"))
    assert Environment(Shown).episode(question).columns == {"solution": 7, "answers": ["7"]}


def test_questions_that_lack_a_column_of_reset_are_refused_before_a_run():
    questions = [Question(n, "Go.", metadata={"numbers": [1]} if n == "a" else {}) for n in "ab"]
    Environment(Countdown).check_questions(questions[:1])
    with pytest.raises(DataError, match="needs numbers to begin, and question 'b' does not say"):
        Environment(Countdown).check_questions(questions)


@pytest.mark.parametrize(
    ("written", "seed"),
    [("7", 7), (" 7 ", 7), (7.0, 7), (np.int64(7), 7), (-7, -7), ("many", "many"), (True, True)]
    + [(gap, zlib.crc32(b"q")) for gap in ("", float("nan"), None)],
)
def test_a_seed_from_csv_or_pandas_is_the_number(written, seed):
    class Seeded(Countdown):
        def reset(self, seed: int) -> str:
            return repr(seed)

    question = Question("q", "Go.", metadata={"seed": written})
    (began,) = Environment(Seeded).episode(question).columns.values()
    assert (question_seed(question), began) == (seed, seed)
    assert type(began) is type(seed)


def test_the_policy_reads_a_policy_mistake_that_step_raises(chat):
    def confused(room, action):
        raise PolicyMistake("no such word" if action == "fly" else "")

    trajectory = play_episode(chat, room(step=confused), ["fly", "hm", "hm"], turns=3)
    read = [turn.results[0].content for turn in trajectory.turns[:2]]
    assert read == ["no such word", "this call makes no sense"]
    assert not trajectory.turns[0].results[0].ok


class NoSuchMove(Exception):
    pass


class Begins:
    def reset(self) -> None:
        pass


@pytest.mark.parametrize("error", [ValueError, NoSuchMove])
def test_the_policy_reads_an_error_that_its_action_provokes(chat, error):
    def refuses(room, action):
        raise error("the game is over")

    class Refuses(Begins):
        def wait(self, how: str) -> str:
            """Wait."""
            raise error("the game is over")

    of_class = functools.partial(
        play_episode, chat, Environment(Refuses), ["on"] * 3, tool_name="wait"
    )
    for playing in (
        functools.partial(play_episode, chat, room(step=refuses), ["fly"] * 3),
        of_class,
    ):
        trajectory = playing(turns=3)
        read = [turn.results[0] for turn in trajectory.turns[:2]]
        assert all("the game is over" in result.content and not result.ok for result in read)
        assert trajectory.figures["steps"] == 3


@pytest.mark.parametrize("flag", ["False", None, 2])
@pytest.mark.parametrize("of", ["terminated", "truncated"])
def test_an_end_that_is_neither_true_nor_false_stops_the_run(chat, of, flag):
    ends = (flag, False) if of == "terminated" else (False, flag)
    message = rf"gave {re.escape(repr(flag))} as {of} from step. Return True or False"
    with pytest.raises(ToolError, match=message):
        play(chat, room(step=("x", 0.0, *ends, {})), ["look"])


BASE = sqlite3.connect(":memory:")


class Shop(Begins):
    def wait(self, how: str) -> str:
        """Wait."""
        return str(BASE.execute("select 'open'").fetchone()[0])


class Clock(Begins):
    def wait(self, how: str) -> str:
        """Wait."""
        before = signal.signal(signal.SIGALRM, lambda *frame: None)
        signal.signal(signal.SIGALRM, before)
        return "open"


@pytest.mark.parametrize("kind", [Shop, Clock])
def test_an_environment_that_needs_the_main_thread_is_no_mistake_of_the_policy(chat, kind):
    with pytest.raises(TrajectoryLost, match="made for one thread set thread_safe: false"):
        play_episode(chat, Environment(kind), ["on"], tool_name="wait", max_restarts=0)


def test_a_mistake_of_the_policy_before_it_did_anything_stops_the_run(chat):
    class Early(Guess):
        def reset(self, seed: int) -> str:
            raise PolicyMistake("no such level")

    with pytest.raises(
        ToolError, match=r"Early raised PolicyMistake: no such level in open for .*\(test_env"
    ):
        play(chat, Environment(Early), ["1"], tool_name="guess")


def test_an_attempt_that_is_truncated_is_unfinished(chat):
    def late(room, action):
        return ("still here", -0.1, False, room.turn == 2, {})

    trajectory = play_episode(chat, room(step=late), ["wait"], turns=8)
    assert (trajectory.ended_by, len(trajectory.turns)) == ("tool", 2)
    paid = {"steps": 2, "earned": pytest.approx(-0.2)}
    assert trajectory.figures == {**paid, "ended": 0, "truncated": 1}
    reward = EnvironmentReward(last_step=False)
    assert [reward.score(trajectory, k) for k in (0, 1)] == pytest.approx([-0.1, -1.1])
    assert EnvironmentOutcome(of="last_step").score(trajectory) == 0


def test_a_class_that_is_not_an_environment_is_refused_with_the_next_step(chat):
    class Bare:
        def reset(self):
            return "x"

    for wrong, message in (
        (ToolError, r"ToolError has no reset, which begins an attempt. Add"),
        (Bare, "Bare has no public method besides reset"),
        ("no_such.Guess", "'no_such.Guess', which cannot be imported"),
        (len, "which is no class"),
    ):
        with pytest.raises(RecipeError, match=message):
            Environment(wrong)
    engine = ScriptedEngine(chat.tokenizer, lambda session, turn: "1")
    rollout = Rollout(Action(1, "text", "guess"), [Environment(Guess)], max_tokens=4000)
    with pytest.raises(DataError, match="environment Guess needs seed to begin, and question 'q'"):
        rollout.play(engine, chat, [Question("q", "Go.")], 1, (0,))


# ------------------------------------------------------------------------- capacity


@pytest.mark.parametrize("lockstep", [True, False])
def test_capacity_counts_the_branches_of_open_environments(chat, rooms, lockstep):
    open_at_once = []

    def counts(room, action):
        open_at_once.append(sum(not each.closed for each in rooms))
        return "x", 0.0, False, False, {}

    class Copied(Room):
        def __deepcopy__(self, memo):
            return Copied(self.gives)

    # an attempt of two turns with a branch each has three
    tool = Gymnasium(make=Copied, options={"step": counts}, capacity=7)
    attempts = play(chat, tool, ["on"], size=5, turns=2, probes=1, lockstep=lockstep)
    assert len(attempts.trajectories[0]) == 5
    assert len(attempts.probes[0]) == 10
    assert 3 < max(open_at_once) <= 6


def test_processes_and_collections_share_the_capacity_of_an_environment(chat):
    engine = ScriptedEngine(chat.tokenizer, lambda session, turn: "on")
    rollout = Rollout(Action(2, "text"), [Gymnasium(make=Room, capacity=8)])
    assert rollout.places.max_in_progress(engine, 0) == 8
    assert rollout.places.max_in_progress(engine, 0, Shares(2)) == 4
    assert rollout.places.max_in_progress(engine, 0, Shares(2, 4)) == 1
    with pytest.raises(
        RecipeError, match=r"capacity = 8, and the least .* is 9 \(3 x 3 x 1\): pro"
    ):
        rollout.places.max_in_progress(engine, 0, Shares(3, 3))
    engine.capacity = 2
    assert rollout.places.max_in_progress(engine, 0) == 2
    # an engine serves more, if it has to
    assert rollout.places.max_in_progress(engine, 0, Shares(4)) == 1


def test_a_capacity_that_does_not_suffice_is_refused_before_a_model_is_loaded(tiny_model, tmp_path):
    # an attempt of two turns with two branches each has five
    module = make_module(
        tiny_model, engine=ScriptedEngine(None, None), estimator=Branched(probes=2)
    )
    module.rollout = Rollout(Action(2, "text"), [Gymnasium(make=Room, capacity=2)])
    message = (
        r"environment .*Room.* has capacity = 2, and the least .* at a time is 5 \(1 x 1 x 5\): "
    )
    with pytest.raises(RecipeError, match=message):
        trainer(tmp_path, 1, limit_val_batches=0).fit(module, data())


# ------------------------------------------------------------------------- several tools


def test_two_environments_in_one_recipe_are_refused_by_name():
    tools = [Environment(Guess), lake()]
    message = (
        "environment Guess and environment FrozenLake-v1 both hand over the figure 'steps' of an "
        "attempt, so they do not go together. Leave one of them out of model.rollout.tools."
    )
    with pytest.raises(RecipeError, match=message):
        Rollout(Action(), tools)


def test_a_call_of_another_tool_is_not_a_step(chat):
    class Both(Action):
        """Looks something up in the second turn, and acts in the others."""

        def read(self, text, turn, cut):
            if turn != 1:
                return super().read(text, turn, cut)
            return Reading((ToolCall("look", {"query": text}),))

    engine = ScriptedEngine(chat.tokenizer, lambda session, turn: "down")
    rollout = Rollout(Both(3, "text"), [lake(), Look()], max_turn_tokens=40, max_tokens=4000)
    ((trajectory,),) = rollout.play(engine, chat, [SEEDED], 1, (0,))
    assert [turn.results[0].ok for turn in trajectory.turns] == [True] * 3
    reward = EnvironmentReward(idle=0.5)
    paid = [reward.score(trajectory, k) for k in range(3)]
    assert paid == pytest.approx([-0.1, -0.5, -1.1])


# ------------------------------------------------------------------------- what a user has to mend


class Switch(gymnasium.Env):
    """Two actions, and any `reset` and `step`."""

    action_space, observation_space = spaces.Discrete(2), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, 1.0, True, False, {}


def switch(**methods):
    return type("Switched", (Switch,), methods)


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize(
    "methods",
    [
        {"reset": lambda self, seed=None, options=None: "ab"},
        {"step": lambda self, action: (0, 1.0, True, {})},
        {"step": lambda self, action: None},
    ],
)
def test_the_old_gym_api_is_refused_with_the_form_of_today(chat, registered, methods):
    made = switch(**methods)
    if registered:
        gymnasium.register("Old-v0", made, max_episode_steps=9)
    try:
        tool = Gymnasium("Old-v0") if registered else Gymnasium(make=made)
        with pytest.raises(ToolError, match=r"Gymnasium's form is 'reset\(\*, seed=None, options="):
            play_episode(chat, tool, ["0"])
    finally:
        gymnasium.registry.pop("Old-v0", None)


def own(reset="self, seed: int", press="self, button: str", gives="'x'", begins="'start'"):
    """A class of the user's with a tool."""
    space = {}
    lines = (
        f"class Lift:\n def reset({reset}): return {begins}\n",
        f" def press({press}):\n  'Press a button.'\n  return {gives}\n",
    )
    exec(compile("".join(lines), "lift.py", "exec", dont_inherit=True), space)
    return space["Lift"]


def test_options_that_a_class_does_not_take_are_refused():
    with pytest.raises(RecipeError, match=r"Lift cannot be made with the options \{'lev"):
        Environment(own(), options={"level": 3})


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"begins": "object()"}, "in reset returned an object, .* is neither text nor JSON"),
        ({"begins": "('x', {})"}, "a text, or nothing. If Lift has Gymnasium's form, name"),
        ({"gives": "object()"}, "in press returned an object, .* is neither text nor JSON"),
        ({"gives": "('x', 1.0, True, False, {})"}, "press returned .* Gymnasium's form"),
    ],
)
def test_an_error_names_a_class_that_returns_no_text_and_what_to_return(chat, parts, says):
    with pytest.raises(ToolError, match=says):
        play_episode(chat, Environment(own(**parts)), ["up"], tool_name="press")
