"""Players that do not behave: what they raise, catch, cancel, forget or leave running."""

import asyncio
import contextlib

import pytest

from players.scripted import QUESTION, USER, ActingEcho, FunctionPlayer, play_one, scripted
from players.summariser import Summariser
from turnrl import DataError, Rollout, ToolCall, ToolError, ToolResult
from turnrl.agent.chat import ChatFormat
from turnrl.agent.running import on_loop
from turnrl.engines import MessageSampler, Reply
from turnrl.plugin.errors import PluginError, TrajectoryLost
from worlds import Echo

LOOK = ToolCall("echo", {"text": "abc"})


# ------------------------------------------------------------------------- caught and swallowed


@pytest.mark.timeout(60)
def test_a_player_that_catches_everything_does_not_hold_up_the_run(tiny_policy):
    async def play(attempt):
        while True:
            try:
                await attempt.reply(USER)
            except:  # noqa: E722 - as people write it
                continue

    with pytest.raises(PluginError, match=r"10 refused actions.*except Exception:"):
        play_one(tiny_policy, play)


class Broken(Echo):
    def run(self, calls):
        raise ConnectionError("no route to the shop")


class Gone(Echo):
    def run(self, calls):
        return [TrajectoryLost("the sandbox crashed") for _ in calls]


@pytest.mark.parametrize(
    ("tool", "error"), [(Broken, ToolError), (Gone, TrajectoryLost)], ids=["broken", "lost"]
)
def test_an_attempt_in_a_broken_world_is_not_learned_from_even_if_the_player_caught_the_error(
    tiny_policy, tool, error
):
    async def play(attempt):
        await attempt.reply(USER)
        try:
            await attempt.call([LOOK])
        except Exception:
            return "a guess"

    with pytest.raises(error, match=r"no route|crashed"):
        play_one(tiny_policy, play, tools=[tool()])


def test_a_mistake_of_a_player_counts_even_if_it_caught_the_error(tiny_policy):
    async def play(attempt):
        with contextlib.suppress(Exception):
            await attempt.call([LOOK])
        await attempt.reply(USER)

    with pytest.raises(PluginError, match=r"used attempt.call before its first reply"):
        play_one(tiny_policy, play)


async def _messages(attempt, messages):
    await attempt.reply(messages)


@pytest.mark.parametrize(
    ("messages", "wrong"),
    [
        ("Who?", r"gave the string 'Who\?' to attempt.reply. Give it a list of messages, such as"),
        ([], "gave no messages to attempt.reply"),
        ([{"role": "human", "content": "?"}], "A message has a role .system, user, assistant"),
        ([{"role": "user", "content": None}], "Give it a content"),
        ([*USER, {"role": "assistant", "content": "x"}], "reply to a message of the assistant"),
    ],
)
def test_messages_that_are_not_well_formed_are_named(tiny_policy, messages, wrong):
    with pytest.raises(PluginError, match=wrong):
        play_one(tiny_policy, lambda attempt: _messages(attempt, messages))


def test_a_play_that_is_not_a_coroutine_function_is_named(tiny_policy):
    class Plain(FunctionPlayer):
        def play(self, attempt):
            return "here"

    with pytest.raises(PluginError, match=r"gave no coroutine. Write `async def play"):
        scripted(tiny_policy, Plain(None), ["x"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("nested", [False, True])
def test_a_player_that_exits_stops_only_its_own_run(tiny_policy, nested):
    async def leave():
        raise SystemExit(3)

    async def play(attempt):
        await attempt.reply(USER)
        await (asyncio.create_task(leave()) if nested else leave())

    with pytest.raises(PluginError, match="raised SystemExit: 3"):
        play_one(tiny_policy, play)
    assert on_loop(asyncio.sleep(0, "the loop runs")) == "the loop runs"


def test_a_player_that_cancels_its_own_task_is_not_played_again(tiny_policy):
    played = []

    async def play(attempt):
        played.append(len(attempt.turns))
        await attempt.reply(USER)
        asyncio.current_task().cancel()
        await asyncio.sleep(1)

    with pytest.raises(PluginError, match="was cancelled by a task of its own"):
        play_one(tiny_policy, play)
    assert played == [0]


# ------------------------------------------------------------------------- in a hurry


class Slow(ActingEcho):
    """Answers in its own time, and pays for it."""

    timeout_s = 10.0

    async def run(self, calls):
        await asyncio.sleep(0.1)
        return [ToolResult("done", reward=1.0) for _ in calls]


def test_a_call_belongs_to_the_turn_that_made_it(tiny_policy):
    async def play(attempt):
        await attempt.reply(USER)
        call = asyncio.create_task(attempt.call([LOOK]))
        await asyncio.sleep(0)
        await attempt.reply(USER)
        await call

    trajectory = play_one(tiny_policy, play, tools=[Slow()])
    assert [turn.reward for turn in trajectory.turns] == [1.0, 0.0]
    assert [len(turn.reading.calls) for turn in trajectory.turns] == [1, 0]


@pytest.mark.parametrize("wait", [False, True])
def test_a_call_beside_a_reply_is_the_players_mistake(tiny_policy, wait):
    async def play(attempt):
        await attempt.reply(USER)
        if wait:
            await attempt.call([LOOK])
        late = asyncio.create_task(attempt.call([LOOK]))  # it begins when the reply has begun
        await attempt.reply(USER)
        await late

    with pytest.raises(PluginError, match=r"called a tool while a reply is sampled.*Await"):
        play_one(tiny_policy, play, tools=[Slow()])


def test_calls_side_by_side_are_counted_and_paired_with_their_results(tiny_policy):
    class Says(ActingEcho):
        async def run(self, calls):
            await asyncio.sleep(0.01 if calls[0].arguments["text"] == "late" else 0)
            return [ToolResult(call.arguments["text"]) for call in calls]

    async def play(attempt):
        await attempt.reply(USER)
        late = asyncio.create_task(attempt.call([ToolCall("echo", {"text": "late"})]))
        await asyncio.sleep(0.005)  # in a batch of its own
        await asyncio.gather(late, attempt.call([ToolCall("echo", {"text": "soon"})] * 2))

    trajectory = play_one(tiny_policy, play, tools=[Says()], max_calls_per_turn=2)
    (turn,) = trajectory.turns
    asked = [call.arguments["text"] for call in turn.reading.calls]
    contents = [result.unread for result in turn.results]
    assert sorted(asked) == ["late", "soon", "soon"]
    assert contents.count("too many calls: at most 2 a turn") == 1
    assert [b for a, b in zip(asked, contents, strict=True) if a != b] == [
        "too many calls: at most 2 a turn"
    ]


def test_a_step_that_a_player_did_not_wait_for_is_paid_all_the_same(tiny_policy):
    async def play(attempt):
        await attempt.reply(USER)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await attempt.call([LOOK])
        return "in a hurry"

    trajectory = play_one(tiny_policy, play, tools=[Slow()])
    assert (trajectory.turns[0].reward, trajectory.answer) == (1.0, "in a hurry")


def test_a_reply_that_was_cancelled_leaves_a_history_that_is_right(tiny_policy):
    chat = ChatFormat(tiny_policy.tokenizer)
    slow = []

    async def says(session, turn):
        if turn == 1 and not slow:
            slow.append(1)
            await asyncio.sleep(5)
        return "x"

    async def play(attempt):
        first = (await attempt.reply(USER)).text
        on = [*USER, {"role": "assistant", "content": first}, {"role": "user", "content": "on"}]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await attempt.reply(on)
        await attempt.reply(on)

    trajectory = play_one(tiny_policy, play, says)
    first, second = trajectory.samples
    x = tuple(tiny_policy.tokenizer("x")["input_ids"])
    assert first.token_ids == (*chat.encode_prompt(USER), *x)
    on = [*USER, {"role": "assistant", "content": "x"}, {"role": "user", "content": "on"}]
    assert second.token_ids == (*chat.encode_prompt(on), *x)
    assert len(trajectory.turns) == 2


# ------------------------------------------------------------------------- histories


def test_a_first_prompt_without_room_is_an_error_of_the_data(tiny_policy):
    async def play(attempt):
        await attempt.reply([{"role": "user", "content": "so long " * 200}])

    with pytest.raises(DataError, match=r"question 'q' makes a prompt of .* no room within"):
        play_one(tiny_policy, play)


def test_a_rewritten_history_reaches_a_server_of_messages_without_the_role_tool(tiny_policy):
    sent = []

    class Server(MessageSampler):
        capacity = None

        async def reply(self, messages, sampling):
            sent.append(messages)
            return Reply("notes")

        async def drain(self):
            pass

    rollout = Rollout(player=Summariser(), tools=[Echo()], max_turn_tokens=40, max_tokens=900)
    rollout.play(Server(), ChatFormat(tiny_policy.tokenizer), [QUESTION], 1, (0,))

    async def play(attempt):
        call = {"role": "assistant", "content": "look"}
        results = [{"role": "tool", "content": text} for text in ("one", "two")]
        await attempt.reply([*USER, call, *results])

    Rollout(player=FunctionPlayer(play), max_tokens=900).play(
        Server(), ChatFormat(tiny_policy.tokenizer), [QUESTION], 1, (0,)
    )
    assert all(m["role"] != "tool" for messages in sent for m in messages)
    assert [m["role"] for m in sent[-1]] == ["user", "assistant", "user"]
    assert sent[-1][-1]["content"] == (
        "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    )


# ------------------------------------------------------------------------- toolsets
