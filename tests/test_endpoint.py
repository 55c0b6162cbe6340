"""A sampler of messages: somebody else's model, by the same turns and tools, never trained on."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch

from pages import blocks
from rollouts import CALL, QUESTION, Brackets, Look
from runs import make_module
from turnrl import Policy, Question, RecipeError, Rollout, score_group
from turnrl.agent.chat import ChatFormat
from turnrl.agent.conversation import MessageConversation
from turnrl.engines import MessageSampler, Reply
from turnrl.rewards.scoring import compute_curves
from turnrl.runs import record
from turnrl.training.learning import TokenColumns
from turnrl.watch import recorder as recording
from turnrl_openai import Endpoint, EndpointError, EndpointServer
from turnrl_openai.reply import read_completion
from turnrl_rewards.qa import ExactMatch, ToolExecuted
from turnrl_segmenters import ReAct
from vendors import Handler, vendor


def endpoint(server, **settings):
    settings = {"api_key_env": "VENDOR_KEY", "patience_s": 5.0, **settings}
    return Endpoint(EndpointServer(server.url, "big", **settings))


def looks_then_answers(messages, number):
    return f"=Paris at turn {len(messages) // 2}" if len(messages) > 2 else CALL


def play(server, chat, rollout=None, size=1, **settings):
    rollout = rollout or Rollout(Brackets(), [Look()])
    sampler = endpoint(server, **settings)
    return rollout.play(sampler, chat, [QUESTION], size, (0,), greedy=True)[0]


def test_a_vendors_model_takes_the_same_turns_with_the_same_tools(chat, monkeypatch):
    monkeypatch.setenv("VENDOR_KEY", "secret")
    with vendor(looks_then_answers) as server:
        (trajectory,) = play(server, chat)
    assert [turn.text for turn in trajectory.turns] == [CALL, "=Paris at turn 1"]
    assert [r.content for r in trajectory.results] == ["about x"]
    assert (trajectory.ended_by, trajectory.answer) == ("answer", "Paris at turn 1")
    assert server.bodies[1] == {
        "model": "big",
        "messages": [
            {"role": "user", "content": QUESTION.text},
            {"role": "assistant", "content": CALL},
            {"role": "user", "content": "<result>about x</result>"},
        ],
        "temperature": 0.0,
        "max_tokens": 512,
    }
    assert server.keys == ["Bearer secret"] * 2


@pytest.mark.parametrize("name", ["http_proxy", "ALL_PROXY"])
def test_a_key_never_goes_through_a_proxy_to_this_machine(name, chat, monkeypatch):
    monkeypatch.setenv("VENDOR_KEY", "secret")
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    with vendor(looks_then_answers) as server:
        (trajectory,) = play(server, chat)
    assert trajectory.answer == "Paris at turn 1"


def test_endpoint_replies_are_scored_and_recorded(chat, tmp_path):
    question = Question("q", "?", ("Paris",))
    says = lambda messages, number: "=Paris" if len(messages) > 2 else CALL  # noqa: E731
    with vendor(says) as server:
        rollout = Rollout(Brackets(), [Look()])
        (group,) = rollout.play(endpoint(server), chat, [question], 3, (0,))
    scored = score_group(group, [ExactMatch(), ToolExecuted()])
    assert scored.outcome.tolist() == [1.0] * 3
    assert torch.allclose(scored.turn_rewards, torch.tensor([[0.2, 0.0]] * 3))
    assert (
        compute_curves(group[0])["exact_match"] == compute_curves(group[0])["tool_execution"] == 1.0
    )
    recording.write_rows(
        [*recording.record_rows([scored], [None], "val", 0, 0)], tmp_path / "some.parquet"
    )
    rows = record.read(tmp_path)
    assert [(r["answer"], r["prompt_tokens"], len(r["turns"])) for r in rows] == [
        ("Paris", None, 2)
    ] * 3
    assert "turns=2, tokens=0" in repr(group[0])


def test_a_trajectory_of_messages_is_never_trained_on(chat, tiny_model):
    with vendor(looks_then_answers) as server:
        (trajectory,) = play(server, chat)
        assert trajectory.samples == ()
        with pytest.raises(
            RecipeError, match="question 'q1' has no tokens: a model that only takes"
        ):
            _ = trajectory.token_rows
        with pytest.raises(RecipeError, match=r"To learn, .* collect with an Engine"):
            TokenColumns([trajectory], [])
        with pytest.raises(RecipeError, match=r"engine is an Endpoint"):
            make_module(tiny_model, engine=endpoint(server))


def test_a_turn_ends_at_the_stop_string_even_if_the_server_continues(chat):
    class Ends(Brackets):
        stop = ("<end>", "]")

    says = lambda messages, number: f"{CALL}<end> and so on" if number == 1 else "=x"  # noqa: E731
    with vendor(says) as server:
        (trajectory,) = play(server, chat, Rollout(Ends(), [Look()]))
    assert trajectory.turns[0].text == CALL
    assert not trajectory.turns[0].cut


def test_the_limits_are_counted_in_the_tokens_of_the_policy(chat):
    long = Look(lambda query: "word " * 5000)
    rollout = Rollout(Brackets(), [long], max_result_tokens=20, max_turn_tokens=40)
    with vendor(lambda messages, number: CALL if number < 3 else "=x" * 100) as server:
        (trajectory,) = play(server, chat, rollout)
        assert [chat.count_tokens(r.content) <= 20 for r in trajectory.results] == [True, True]
        assert [body["max_tokens"] for body in server.bodies] == [40] * 3
        assert (trajectory.turns[2].cut, trajectory.ended_by) == (True, "length")
        # a trajectory whose first result leaves no room ends there, and nobody reads the result
        room = len(rollout.segmenter_loop.prompt_ids(QUESTION, chat)) + chat.count_tokens(CALL) + 20
        (short,) = play(server, chat, replace(rollout, max_tokens=room))
    assert (len(short.turns), short.ended_by, short.results) == (1, "length", ())


def test_tools_that_a_template_would_describe_stand_in_the_system_message(tiny_model):
    policy = Policy(str(tiny_model), chat_template="qwen3").build()
    call = '<tool_call>\n{"name": "look", "arguments": {"query": "x"}}\n</tool_call>'

    def says(messages, number):
        return "<answer>Paris</answer>" if number > 1 else call

    with vendor(says) as server:
        (trajectory,) = play(server, ChatFormat(policy.tokenizer), Rollout(ReAct(), [Look()]))
    assert trajectory.answer == "Paris"
    system, user, assistant, result = server.bodies[1]["messages"]
    assert system["content"].startswith("Answer the question. You have 4 turns.")
    assert json.loads(system["content"].split("<tools>")[1].split("</tools>")[0]) == {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks things up.",
            "parameters": Look.parameters,
        },
    }
    assert (user["role"], assistant["content"]) == ("user", call)
    assert result == {"role": "user", "content": "<tool_response>\nabout x\n</tool_response>"}


def test_a_server_that_is_away_for_a_moment_is_asked_again(chat):
    with vendor(lambda messages, number: (503, 429)[number - 1] if number < 3 else "=x") as server:
        (trajectory,) = play(server, chat)
    assert trajectory.answer == "x"
    assert len(server.bodies) == 3


@pytest.mark.parametrize(("says", "message"), [
    (lambda *_: 500, r"'big' at http.* answer \(status 500: .*\)\. turnrl waited 0\.3 s for it"),
    (lambda *_: 401, r"refused a request \(status 401: .* VENDOR_KEY holds the wrong key"),
    (lambda *_: 404, r"status 404: .* Correct base_url, or model"),
    (lambda *_: 400, r"status 400: .* Correct model or extra"),
    (lambda *_: time.sleep(1) or "=x", r"no whole answer within timeout_s = 0\.2"),
])  # fmt: skip
def test_a_server_that_cannot_be_asked_is_named_without_the_key(chat, monkeypatch, says, message):
    monkeypatch.setenv("VENDOR_KEY", "secret")
    with vendor(says) as server, pytest.raises(EndpointError, match=message) as raised:
        play(server, chat, patience_s=0.3, timeout_s=0.2 if "timeout" in message else 5)
    assert "secret" not in str(raised.value)


def complete(message, ended="stop"):
    """The reply to this message, as turns hold it."""
    return read_completion({"choices": [{"message": message, "finish_reason": ended}]})


LOOK = '<tool_call>\n{"name": "look", "arguments": {"query": "x"}}\n</tool_call>'
FUNCTION = {"name": "look", "arguments": '{"query": "x"}'}


@pytest.mark.parametrize(("message", "text", "thinks"), [
    ({"content": [{"type": "text", "text": "=Pa"}, {"type": "x"}, {"type": "text", "text": "ris"}]},
     "=Paris", False),
    ({"content": "=Paris", "reasoning_content": "hm"}, "=Paris", True),
    ({"content": None, "reasoning": "hm"}, "<think>hm</think>", True),
    ({"content": None, "refusal": "I will not."}, "I will not.", False),
    ({"tool_calls": [{"function": FUNCTION}] * 2}, f"{LOOK}\n{LOOK}", False),
    ({"content": "So:", "tool_calls": [{"function": {**FUNCTION, "arguments": {"query": "x"}}}]},
     "So:\n" + LOOK, False),
    ({"content": "\ud83d\ude00 \ud800"}, "😀 \ufffd", False),
    ({}, "", False),
])  # fmt: skip
def test_what_a_vendor_puts_beside_the_content_is_used(message, text, thinks):
    assert complete(message) == (text, "stop", thinks)


@pytest.mark.parametrize("sent", [
    *({}, {"choices": []}, {"choices": [{"message": "x"}]}, "[" * 50_000, "<html>"),
    *({"choices": [{"message": message}]} for message in (
        {"content": 0.5}, {"content": ["x"]}, {"content": [{"type": "text", "text": 1}]},
        {"tool_calls": [{"name": "look"}]})),
])  # fmt: skip
def test_a_response_that_is_not_a_chat_completion_is_named(chat, monkeypatch, sent):
    data = (sent if isinstance(sent, str) else json.dumps(sent)).encode()
    monkeypatch.setattr(Handler, "complete", lambda self, _: self.send(data))
    with (
        vendor(lambda *_: "=x") as server,
        pytest.raises(EndpointError, match=r"is no chat completion: .* base_url"),
    ):
        play(server, chat)


def test_an_error_in_place_of_a_reply_is_asked_again_or_named(chat, monkeypatch):
    complete = Handler.complete

    def fails(self, choice):
        if len(self.server.bodies) <= 2:
            error = {"message": "no room", "code": code}
            error = error | {"object": "error"} if code == 502 else {"error": error}
            self.send(json.dumps(error).encode())
        else:
            complete(self, choice)

    monkeypatch.setattr(Handler, "complete", fails)
    for code in (429, None, 502):  # noqa: B007 - `fails` reads it
        with vendor(lambda *_: "=Paris") as server:
            (trajectory,) = play(server, chat)
        assert (trajectory.answer, len(server.bodies)) == ("Paris", 3)
    for code in (400, "context_length_exceeded"):  # noqa: B007
        with (
            vendor(lambda *_: "=x") as server,
            pytest.raises(EndpointError, match=r"no room \(code 40"),
        ):
            play(server, chat)


def test_a_reply_is_read_up_to_a_size(chat, monkeypatch):
    monkeypatch.setattr(Handler, "complete", lambda self, _: self.send(b"x" * (2**24 + 9)))
    with vendor(lambda *_: "=x") as server, pytest.raises(EndpointError, match="more than 16,777"):
        play(server, chat)


def test_the_reasoning_of_a_vendor_is_said_once(chat, monkeypatch, caplog):
    complete = Handler.complete

    def thinks(self, choice):
        complete(self, choice | {"message": {**choice["message"], "reasoning": "hm"}})

    monkeypatch.setattr(Handler, "complete", thinks)
    with vendor(lambda *_: "=x") as server:
        play(server, chat, size=3)
    assert caplog.text.count("sends its reasoning beside its replies") == 1


def test_the_reason_why_a_reply_ended_decides_what_it_is(chat, monkeypatch):
    complete = Handler.complete

    def ends(self, choice):
        again = len(self.server.bodies) > 1
        complete(self, choice if again else choice | {"finish_reason": why})

    monkeypatch.setattr(Handler, "complete", ends)
    asked = []
    for why in ("COMPLETE", "eos_token", "max_tokens", "abort"):  # noqa: B007 - `ends` reads it
        with vendor(lambda *_: "=Paris") as server:
            (trajectory,) = play(server, chat)
        asked.append((trajectory.answer, trajectory.turns[0].cut, len(server.bodies)))
    # an unfinished reply is asked for again
    assert asked == [*[("Paris", False, 1)] * 2, (None, True, 1), ("Paris", False, 2)]
    why = "content_filter"
    with (
        vendor(lambda *_: "=Pa") as server,
        pytest.raises(EndpointError, match=r"ended a reply with 'content_filter', .* Leave the"),
    ):
        play(server, chat)


def test_no_more_requests_are_under_way_than_the_server_takes(chat):
    under_way, most = [], []

    def says(messages, number):
        under_way.append(number)
        most.append(len(under_way))
        time.sleep(0.02)
        under_way.remove(number)
        return "=x"

    for lockstep in (True, False):
        with vendor(says) as server:
            rollout = Rollout(Brackets(), [], lockstep=lockstep)
            assert len(play(server, chat, rollout, 10, concurrency=3)) == 10
    assert 1 < max(most) <= 3


def test_nothing_follows_a_history_whose_last_turn_was_begun_and_not_ended(chat):
    asked, more = {"role": "user", "content": "?"}, {"role": "user", "content": "and?"}
    history = MessageConversation(None, chat, [asked], ())
    assert history.messages_beyond([asked, more], ()) == [more]
    assert history.messages_beyond([more, asked], ()) is None
    assert history.messages_beyond([asked, {"role": "system", "content": ""}], ()) is None
    history.broken = True
    assert history.messages_beyond([asked, more], ()) is None


def test_a_branch_continues_from_the_messages_of_its_trajectory(chat):
    class Echo(MessageSampler):
        async def reply(self, messages, sampling):
            asked.append([message["content"] for message in messages])
            return Reply(f"={len(asked)}" if len(messages) > 2 else CALL)

        async def drain(self):
            asked.append("drained")

    asked = []
    rollout = Rollout(Brackets(), [Look()])
    ((trunk,),), (probes,), _ = rollout.begin(Echo(), chat, [QUESTION], 1, (0,), 1).result()
    assert trunk.turns[0].text == CALL
    assert [(p.trajectory.begins, len(p.trajectory.turns)) for p in probes] == [(0, 2), (1, 2)]
    first = [QUESTION.text, CALL, "<result>about x</result>"]
    assert asked == [[QUESTION.text]] * 2 + [first] * 3 + ["drained"]


def test_the_example_on_the_page_scores_a_vendors_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (example,) = (
        p.text for p in blocks("plugins/turnrl-openai/README.md") if p.language == "python"
    )
    with vendor(lambda messages, number: "<answer>Lima</answer>") as server:
        exec(example.replace("https://api.example.com/v1", server.url), {})
    assert len(server.bodies) == 20
    assert capsys.readouterr().out.count("'exact_match': 0.0") > 10
