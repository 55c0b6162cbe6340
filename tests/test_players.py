"""Players: agents that drive their attempts themselves, and worlds that pay by the step."""

import asyncio
import re

import gymnasium
import pytest
import torch

from commands import save
from players.frozen_lake import MOVES, FrozenLake, Lakes, Walker
from players.plain_agent import PlainAgent
from players.scripted import QUESTION, USER, FunctionPlayer, play_one, scripted, walked
from players.summariser import Summariser
from runs import adamw, column, trainer
from turnrl import (
    MTGRPO,
    AttemptOver,
    ClippedSurrogate,
    Player,
    Policy,
    Question,
    QuestionData,
    RecipeError,
    Rollout,
    Stateful,
    Tool,
    ToolCall,
    ToolError,
    ToolResult,
    ToolSpec,
)
from turnrl.agent.chat import ChatFormat
from turnrl.cli import main
from turnrl.plugin.errors import PluginError, TrajectoryLost
from turnrl.runs import record
from turnrl.testing import check_player
from turnrl.types import ToolSession
from turnrl_estimators import Branched
from turnrl_rewards import StepReward
from turnrl_rewards.progress import informed_turns
from turnrl_slots import Slots
from worlds import Answered, Boundless, Called, Echo, Letters, Numbers


def trained(model, folder, player, tools, rewards, source, epochs=2, budget=None, **options):
    """A module after a short training, without validation."""
    rollout = Rollout(player=player, tools=tools, max_turn_tokens=8, max_tokens=256)
    settings = {"group_size": 4, "steps_per_pass": 2, "optimizer": adamw(3e-3), **options}
    module = MTGRPO(
        Policy(str(model), minibatch_tokens=budget), rollout, rewards, engine=Slots(), **settings
    )
    data = QuestionData(source, None, questions_per_iteration=2)
    trainer(folder, epochs, limit_val_batches=0).fit(module, data)
    return module


# ------------------------------------------------------------------------- agents of users


def test_a_gymnasium_environment_trains_on_the_reward_of_each_step(tiny_model, tmp_path):
    module = trained(tiny_model, tmp_path, Walker(), [FrozenLake()], [StepReward()], Lakes())
    rows = record.read(tmp_path / "version_0", split="train")
    assert len(rows) == 16
    assert {row["ended_by"] for row in rows} <= {"tool", "turns"}
    moved = 0
    for row in rows:  # walked again, by Gymnasium alone
        schedule = (10, -1, -0.1)
        env = gymnasium.make("FrozenLake-v1", is_slippery=False, reward_schedule=schedule)
        env.reset()
        over = False
        for turn in row["turns"]:
            way = next((letter for letter in turn["text"] if letter in MOVES), None)
            wanted = 0.0
            if way is not None:
                _, wanted, ended, late, _ = env.step(MOVES[way])
                over, moved = ended or late, moved + 1
            assert turn["reward"] == pytest.approx(float(wanted))
        assert (row["ended_by"] == "tool") == over
        assert row["exact_match"] is None  # there is nothing to match
    assert moved > 20
    assert column(tmp_path, "train/logprob_gap")[-1] < 1e-5
    assert module.experience is not None


def test_an_agent_that_is_a_plain_coroutine_trains(tiny_model, tmp_path):
    rewards = [Answered(), Called()]
    module = trained(tiny_model, tmp_path, PlainAgent(), [Echo()], rewards, Numbers())
    assert max(column(tmp_path, "train/logprob_gap")) < 1e-5
    chat = module.chat
    for trajectory in module.experience.trajectories:  # one history, each message after the last
        assert len(trajectory.samples) == 1
        asked = f"{trajectory.question.text} Name what to look up."
        prompt = chat.encode_prompt([{"role": "user", "content": asked}])
        assert trajectory.sample.prompt_ids == prompt
        shown = chat.tokenizer.decode(trajectory.sample.token_ids)
        for turn in trajectory.turns[:-1]:
            assert f"{turn.results[0].content} Go on." in shown


def test_an_agent_that_summarises_its_context_trains_on_all_its_histories(tiny_model, tmp_path):
    module = trained(
        tiny_model, tmp_path, Summariser(), [Echo()], [Answered(), Called()], Numbers()
    )
    assert max(column(tmp_path, "train/logprob_gap")) < 1e-5
    for trajectory in module.experience.trajectories:
        first, second = trajectory.samples
        assert {k for k in first.turn_index if k >= 0} == {0, 1, 2}
        assert {k for k in second.turn_index if k >= 0} == {3}
        assert trajectory.turns[2].text in module.chat.tokenizer.decode(second.prompt_ids)
        sampled = sum(k >= 0 for sample in trajectory.samples for k in sample.turn_index)
        assert len(trajectory.sampled_turns) == sampled
    assert column(tmp_path, "rollout/histories") == [2.0, 2.0]
    row = record.read(tmp_path / "version_0", split="train")[0]
    assert len(row["sample_tokens"]) == 2
    assert [turn["sample"] for turn in row["turns"]] == [0, 0, 0, 1]


def test_transcripts_and_play_show_what_a_player_sent(recipe, tmp_path, capsys):
    recipe["model"]["rollout"] |= {
        "segmenter": None,
        "player": "players.summariser.Summariser",
        "tools": ["worlds.Echo"],
        "max_tokens": 256,
    }
    save(recipe)
    assert main(["fit", "recipe.yaml", "--trainer.max_epochs", "1"]) == 0
    text = (tmp_path / "runs/recipe/version_0/transcripts/iteration_0001.txt").read_text()
    capsys.readouterr()
    assert main(["play", "runs/recipe/version_0", "Number 7?"]) == 0
    for shown in (text, capsys.readouterr().out):
        sent = re.findall(r"^-- turn \d.*\n((?:   > .*\n)+)", shown, re.M)
        first, second, third, fourth = sent[:4]
        assert "Number " in first
        assert "letters" in second  # the result, and nothing of the turn before
        assert "Number " not in second
        assert "Sum up." in third
        assert "Number " in fourth  # a history of its own
        assert "Notes: " in fourth


@pytest.mark.parametrize(
    "level", ["trajectory", *(pytest.param(n, marks=pytest.mark.slow) for n in ("token", "turn"))]
)
def test_learning_covers_all_histories_of_a_trajectory(tiny_model, tmp_path, level):
    """However the iteration is cut into minibatches: a ratio of a whole trajectory counts the
    tokens of all its histories."""
    ends = []
    for tokens in (1, 100_000):
        module = trained(
            *(tiny_model, tmp_path / str(tokens), Summariser(), [Echo()]),
            *([Answered(), Called()], Numbers()),
            epochs=1,
            passes_per_iteration=2,
            budget=tokens,
            objective=ClippedSurrogate(ratio_level=level),
        )
        ends.append(torch.cat([p.detach().flatten() for p in module.policy.parameters()]))
    assert torch.allclose(*ends, atol=2e-5)
    assert not torch.equal(ends[0], torch.zeros_like(ends[0]))


@pytest.mark.parametrize(
    ("player", "replies", "tools", "question"),
    [
        (Walker(), ["d", "r"], [FrozenLake()], Question("q", "Go!", metadata={"seed": 0})),
        (PlainAgent(), ["echo", "a"], [Echo()], QUESTION),
        (Summariser(), ["one", "two", "notes", "here"], [Echo()], QUESTION),
    ],
    ids=["Walker", "PlainAgent", "Summariser"],
)
def test_players_keep_to_the_contract(player, replies, tools, question):
    check_player(player, replies, tools, question)


# ------------------------------------------------------------------------- check_player


def until_here(extend):
    """A player that sends what `extend` adds to its messages, until the model replies "here"."""

    async def play(attempt):
        messages = [{"role": "user", "content": attempt.question.text}]
        while True:
            reply = await attempt.reply(messages)
            if reply.text == "here":
                return reply.text
            messages += await extend(attempt, reply)

    return FunctionPlayer(play)


def messages_after(reply, user="on"):
    return [{"role": "assistant", "content": reply}, {"role": "user", "content": user}]


async def _edits_the_reply(attempt, reply):
    return messages_after(reply.text.strip())


async def _calls_echo(attempt, reply):
    (result,) = await attempt.call([ToolCall("echo", {"text": reply.text})])
    return messages_after(reply.text, result.content)


def test_a_passing_check_warns_about_tools_that_change():
    async def play(attempt):
        reply = await attempt.reply(USER, attempt.tools)
        reply = await attempt.reply([*USER, *messages_after(reply.text)])
        return reply.text

    with pytest.warns(UserWarning, match="History 2 began, because its tools changed to none"):
        check_player(FunctionPlayer(play), ["there", "here"], [Echo()], QUESTION)


@pytest.mark.parametrize(
    ("extend", "tools", "message"),
    [
        (_edits_the_reply, (), r"History 2 began, because the model replied 'there ', and {'role': "
         r"'assistant', 'content': 'there'} was sent back. Send every reply back word for word"),
        (_calls_echo, (), r"In turn 1 a call failed: .*echo.* Pass check_player the tools"),
    ],
)  # fmt: skip
def test_a_passing_check_warns_about_a_likely_mistake(extend, tools, message):
    with pytest.warns(UserWarning, match=message):
        check_player(until_here(extend), ["there ", "here"], tools, QUESTION)


async def _parses_a_result(attempt, reply):
    (result,) = await attempt.call([ToolCall("echo", {"text": reply.text})])
    return messages_after(reply.text, str(int(result.content.split()[0])))


async def _nothing_more(attempt):
    await attempt.reply(USER)


@pytest.mark.parametrize(
    ("player", "replies", "message"),
    [
        (until_here(_calls_echo), ["there"], r"asked for another reply .* Turns: 1, calls: 1. "
         r"In turn 1 a call failed: .*echo"),
        (FunctionPlayer(_nothing_more), ["there"], r"returned None after .* Turns: 1, calls: 0"),
        (until_here(_calls_echo), ["here", "here"],
         r"ended by 'answer' after 1 of 2 replies. Give "),
        (until_here(_parses_a_result), ["there", "here"],
         r"raised ValueError: .* In turn 1 a call failed: "),
        (Boundless(), ["there"], r"^Boundless has no max_turns. Set it in the class: max_turns"),
    ],
)  # fmt: skip
def test_a_failing_check_reports_what_it_saw_and_what_to_change(player, replies, message):
    with pytest.raises(AssertionError, match=message):
        check_player(player, replies, (), QUESTION)


# ------------------------------------------------------------------------- the rules of an attempt


class AsksForever(Player):
    """Asks for replies until its attempt is over; if it guards, it then answers with a guess."""

    max_turns = 3

    def __init__(self, guards=False):
        self.guards, self.over = guards, 0

    async def play(self, attempt):
        messages = [{"role": "user", "content": "?"}]
        while True:
            try:
                reply = await attempt.reply(messages)
            except AttemptOver:
                self.over += 1
                if self.guards:
                    return "a guess"
                raise
            messages += [{"role": "assistant", "content": reply.text}]
            messages += [{"role": "user", "content": "on"}]


def test_max_turns_ends_an_attempt_of_a_player(tiny_policy):
    (trajectory,) = scripted(tiny_policy, AsksForever(), ["x"]).trajectories[0]
    assert (len(trajectory.turns), trajectory.ended_by, trajectory.answer) == (3, "turns", None)
    guarding = AsksForever(guards=True)
    (trajectory,) = scripted(tiny_policy, guarding, ["x"]).trajectories[0]
    assert (trajectory.ended_by, trajectory.answer, guarding.over) == ("turns", "a guess", 1)


def test_max_tokens_limits_each_history_of_a_player(tiny_policy):
    chat = ChatFormat(tiny_policy.tokenizer)
    prompt = len(chat.encode_prompt([{"role": "user", "content": "?"}]))
    (trajectory,) = scripted(
        tiny_policy, AsksForever(), ["xx"], max_tokens=prompt + 4
    ).trajectories[0]
    assert trajectory.ended_by == "length"
    assert trajectory.tokens <= prompt + 4


async def _nothing(attempt):
    return None


async def _number(attempt):
    await attempt.reply(USER)
    return 7


async def _raises(attempt):
    await attempt.reply(USER)
    raise KeyError("no such thing")


async def _calls_first(attempt):
    await attempt.call([ToolCall("echo", {"text": "x"})])


async def _reads_first(attempt):
    attempt.read(None)


async def _two_at_once(attempt):
    await asyncio.gather(attempt.reply(USER), attempt.reply(USER))


@pytest.mark.parametrize(
    ("play", "message"),
    [
        (_nothing, "FunctionPlayer.play on question 'q' asked for no reply. Await attempt.reply"),
        (_number, "FunctionPlayer.play on question 'q' returned an int. Return a text, or None."),
        (_raises, "FunctionPlayer.play on question 'q' raised KeyError: 'no such thing'"),
        (_calls_first, "used attempt.call before its first reply"),
        (_reads_first, "used attempt.read before its first reply"),
        (_two_at_once, "asked for a reply while another is sampled"),
    ],
)
def test_a_mistake_of_a_player_is_named(tiny_policy, play, message):
    with pytest.raises(PluginError, match=message.replace(".", r"\.")):
        play_one(tiny_policy, play, tools=[Echo()])


@pytest.mark.parametrize("raises", [ToolError("the shop is closed"), KeyError("x")])
def test_an_error_in_a_players_task_is_raised_unchanged(tiny_policy, raises):
    async def task(attempt):
        await attempt.reply(USER)
        raise raises

    async def play(attempt):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(task(attempt))

    kind, text = (ToolError, "closed") if isinstance(raises, ToolError) else (PluginError, "KeyEr")
    with pytest.raises(kind, match=text):
        play_one(tiny_policy, play)


def test_the_end_of_an_attempt_cancels_the_players_tasks(tiny_policy):
    async def play(attempt):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(AsksForever().play(attempt))

    trajectory = play_one(tiny_policy, play)
    assert (len(trajectory.turns), trajectory.ended_by) == (4, "turns")


def test_calls_after_a_tool_ended_the_attempt_are_not_run(tiny_policy):
    tool = Steps()

    async def play(attempt):
        await attempt.reply(USER)
        step = ToolCall("echo", {"text": "x"})
        await attempt.call([step] * 3)
        await attempt.call([step])

    trajectory = play_one(tiny_policy, play, tools=[tool])
    assert (trajectory.ended_by, trajectory.turns[0].reward) == ("tool", 3)
    assert trajectory.figures == {"steps": 3}


def test_attempt_read_keeps_the_calls_and_notes_the_format_error(tiny_policy):
    async def play(attempt):
        await attempt.reply(USER)
        await attempt.call([ToolCall("echo", {"text": "abc"}), ToolCall("echo", {})])
        reading = type(attempt.turns[-1].reading)
        attempt.read(reading(format_error="rambling"))
        await attempt.reply(USER)

    trajectory = play_one(tiny_policy, play, tools=[Echo()])
    first, last = trajectory.turns
    assert [call.arguments for call in first.reading.calls] == [{"text": "abc"}, {}]
    assert [result.ok for result in first.results] == [True, False]
    assert first.reading.format_error == "rambling"
    assert (trajectory.ended_by, last.results) == ("player", ())


def test_messages_that_continue_a_history_extend_it_and_others_start_a_new_one(tiny_policy):
    async def play(attempt):
        first = (await attempt.reply(USER)).text
        parts = [{"type": "text", "text": "on"}]  # another form of the same message
        on = [*USER, {"content": first, "role": "assistant"}, {"role": "user", "content": parts}]
        await attempt.reply(on)
        changed = [*USER, {"role": "assistant", "content": first + "!"}, on[-1]]
        await attempt.reply(changed)
        await attempt.reply(USER)

    trajectory = play_one(tiny_policy, play)
    parts = [{k for k in sample.turn_index if k >= 0} for sample in trajectory.samples]
    assert parts == [{0, 1}, {2}, {3}]
    chat = ChatFormat(tiny_policy.tokenizer)
    on = chat.encode_observation([{"role": "user", "content": "on"}], None)
    (first, *_) = trajectory.samples
    x = tiny_policy.tokenizer("x")["input_ids"]
    assert list(first.token_ids) == [*chat.encode_prompt(USER), *x, *on, *x]


def test_a_history_goes_on_only_with_the_tools_that_its_prompt_describes(tiny_model):
    policy = Policy(str(tiny_model), chat_template="qwen3").build()

    async def play(attempt):
        messages = [*USER]
        for tools in ([look], [look], [look, step], []):
            reply = await attempt.reply(messages, tools)
            messages += messages_after(reply.text)

    look, step = (ToolSpec(name, "About.", {"type": "object"}) for name in ("look", "step"))
    trajectory = play_one(policy, play, max_tokens=2000)
    prompts = [policy.tokenizer.decode(sample.prompt_ids) for sample in trajectory.samples]
    described = [[name for name in ("look", "step") if f'"{name}"' in text] for text in prompts]
    assert described == [["look"], ["look", "step"], []]
    assert [len({*sample.turn_index}) - 1 for sample in trajectory.samples] == [2, 1, 1]


def test_a_rollout_takes_a_segmenter_or_a_player():
    with pytest.raises(RecipeError, match="exactly one of them; it has both"):
        Rollout(Letters(), [Echo()], player=Walker())
    with pytest.raises(RecipeError, match="exactly one of them; it has neither"):
        Rollout(tools=[Echo()])


def test_attempts_of_a_player_cannot_be_branched(tiny_model):
    rollout = Rollout(player=PlainAgent(), tools=[Echo()])
    module = MTGRPO(Policy(str(tiny_model)), rollout, [Answered()], Branched(), engine=Slots())
    with pytest.raises(RecipeError, match="Attempts of the player PlainAgent cannot be branched"):
        module.collector.check()


# ------------------------------------------------------------------------- a world that pays


class Steps(Stateful, Tool):
    """Pays 1 for each step, and ends the attempt at a third."""

    name = "echo"
    description = "Take a step."
    parameters = Echo.parameters
    acts = True
    ends_at = 3

    class Count(ToolSession):
        """The steps of one attempt."""

        steps = 0

        def close(self):
            return {"steps": float(self.steps)}

    def open(self, question):
        return self.Count()

    def run(self, calls):
        return [self._step(call) for call in calls]

    def _step(self, call):
        call.session.steps += 1
        done = call.session.steps == self.ends_at
        return ToolResult(f"step {call.session.steps}", reward=1.0, done=done)


class FourTurns(Letters):
    max_turns = 4


def test_the_world_ends_an_attempt_and_its_last_step_counts(tiny_policy):
    trajectory = walked(tiny_policy, Steps(), ["b"] * 4, FourTurns())
    assert trajectory.ended_by == "tool"
    assert [turn.reward for turn in trajectory.turns] == [1, 1, 1]
    contents = [turn.results[0].content for turn in trajectory.turns]
    assert contents == ["step 1", "step 2", ""]  # nobody read the third
    assert trajectory.turns[2].results[0].unread == "step 3"
    assert str(trajectory).endswith("   result: (not read) step 3\nended by   tool")
    assert [StepReward(0.5).score(trajectory, k) for k in range(3)] == [0.5, 0.5, 0.5]
    assert trajectory.figures == {"steps": 3}


def test_the_last_turn_runs_a_step_but_no_search(tiny_policy):
    trajectory = walked(tiny_policy, Steps(), ["b"] * 2)
    assert trajectory.ended_by == "turns"
    assert [turn.reward for turn in trajectory.turns] == [1, 1]
    # what it did in the world informs nobody
    assert [[r.informs for r in turn.results] for turn in trajectory.turns] == [[True], [False]]
    assert informed_turns(trajectory, 2) == 1
    looked = walked(tiny_policy, Echo(), ["b"] * 2)
    assert looked.turns[1].results == ()


class Look(Echo):
    """A search: a tool that does not act, and counts its runs."""

    name = "look"

    def __init__(self):
        self.runs = 0

    def run(self, calls):
        self.runs += len(calls)
        return super().run(calls)


def test_a_step_counts_even_without_room_to_read_its_result(tiny_policy):
    chat = ChatFormat(tiny_policy.tokenizer)
    prompt = len(Rollout(Letters(), [Echo()]).segmenter_loop.prompt_ids(QUESTION, chat))
    trajectory = walked(tiny_policy, Steps(), ["b"] * 2, max_tokens=prompt + 2)
    assert (trajectory.ended_by, len(trajectory.turns)) == ("length", 1)
    assert trajectory.turns[0].reward == 1
    assert trajectory.turns[0].results[0].content == ""
    looked = walked(tiny_policy, Echo(), ["b"] * 2, max_tokens=prompt + 2)
    assert looked.turns[0].results == ()


@pytest.mark.parametrize("reward", [float("nan"), "much", None, 10**400])
def test_a_reward_of_the_world_is_a_finite_number(tiny_policy, reward):
    class Odd(Echo):
        """A tool whose results bring this reward."""

        def run(self, calls):
            return [ToolResult("x", reward=reward) for _ in calls]

    with pytest.raises(ToolError, match=r"reward a finite number"):
        walked(tiny_policy, Odd(), ["b"] * 2)


# ------------------------------------------------------------------------- the life of a world


class Fragile(Steps):
    """Loses a session at its second step, so many times."""

    def __init__(self, times):
        self.times, self.lost = times, 0

    def _step(self, call):
        if call.session.steps == 1 and self.lost < self.times:
            self.lost += 1
            return TrajectoryLost("the sandbox crashed")
        return super()._step(call)


def test_a_lost_attempt_restarts_with_the_same_seeds(tiny_policy):
    chat = ChatFormat(tiny_policy.tokenizer)
    engine = Slots().build()
    engine.start(tiny_policy, 200)
    engine.sync(0)
    collections = []
    for times in (0, 2):
        rollout = Rollout(FourTurns(), [Fragile(times)], max_turn_tokens=6, max_tokens=200)
        collections.append(rollout.begin(engine, chat, [QUESTION], 4, (3,), 0).result())
    engine.close()
    assert [collection.restarted for collection in collections] == [0, 2]
    ((whole,), (again,)) = (collection.trajectories for collection in collections)
    for first, second in zip(whole, again, strict=True):
        assert first.turns == second.turns
        assert first.sample.token_ids == second.sample.token_ids
        # of a batch of another size
        logprobs = pytest.approx(first.sample.sampler_logprobs, abs=1e-5)
        assert second.sample.sampler_logprobs == logprobs


def test_an_attempt_that_is_lost_repeatedly_stops_the_run(tiny_policy):
    with pytest.raises(TrajectoryLost, match="the sandbox crashed"):
        walked(tiny_policy, Fragile(3), ["b"] * 4, FourTurns(), max_restarts=2)
    assert (
        walked(tiny_policy, Fragile(3), ["b"] * 4, FourTurns(), max_restarts=3).ended_by == "tool"
    )


class Doors(Stateful, Tool):
    """Gives each attempt a tool that opens the door of its question."""

    name = "look"
    description = "Look around."
    parameters = {"type": "object", "properties": {}}

    def open(self, question):
        class Room(ToolSession):
            """Brings a tool that is named after the question."""

            specs = (ToolSpec(f"door_{question.id}", "Open it.", {"type": "object"}),)

        return Room()

    def run(self, calls):
        return [ToolResult(f"{call.name} is used") for call in calls]


def test_a_session_can_have_its_own_tools(tiny_policy):
    async def play(attempt):
        await attempt.reply(USER)
        calls = [ToolCall(name) for name in ("look", "door_1", "door_2")]
        results = await attempt.call(calls)
        return " | ".join(result.content for result in results)

    questions = [Question(str(n), "?", ("x",)) for n in (1, 2)]
    groups = scripted(tiny_policy, FunctionPlayer(play), ["x"], [Doors()], questions).trajectories
    answers = [group[0].answer for group in groups]
    assert answers[0] == "look is used | door_1 is used | no tool 'door_2'; there is look, door_1"
    assert answers[1].startswith("look is used | no tool 'door_1'; there is look, door_2")
