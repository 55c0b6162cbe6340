"""The warm-up: demonstrations through a run's own rollout, what a policy learns from them, and an
adapter's folder as the model that a run begins with."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch

import turnrl
from commands import fails, save
from pages import blocks
from runs import column
from turnrl import (
    MTGRPO,
    Policy,
    Question,
    Reading,
    RecipeError,
    Rollout,
    Segmenter,
    Tool,
    ToolCall,
    ToolResult,
    WarmUp,
    warm_up,
)
from turnrl.cli import main
from turnrl.plugin.errors import PluginError
from turnrl.policy.settings import Lora
from turnrl.recipe.build import build
from turnrl.sft.forced_play import play_demonstrations
from turnrl.sft.random_play import RandomPlay
from turnrl.sft.supervised import Supervised
from turnrl.sft.warmup import demonstrations
from turnrl.testing import check_segmenter
from turnrl_environments import Environment
from turnrl_environments.lake import Lake
from turnrl_segmenters import Action, ReAct, TwoTurn
from worlds import Answered, Echo

QUESTION = Question("q", "What is the capital of France?", ("Paris",))


class Page(Tool):
    name, description = "look", "Look something up."
    parameters = {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "kind": {"enum": ["city", "country"]},
            "most": {"type": "integer", "minimum": 2, "maximum": 4},
            "deep": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2},
            "where": {"type": "object", "properties": {"x": {"type": "number"}}},
            "other": {"anyOf": [{"type": "null"}, {"const": 7}]},
        },
        "required": ["query", "kind", "most", "deep", "tags", "where", "other"],
    }

    def run(self, calls):
        return [ToolResult("Paris is the capital of France.") for _ in calls]


def play(chat, demonstrate, scheme=None, tools=None, questions=(QUESTION,), size=1, **limits):
    limits = {"max_turn_tokens": 400, "max_tokens": 4000, **limits}
    rollout = Rollout(scheme or ReAct(), [Page()] if tools is None else tools, **limits)
    with rollout.running_tools():
        return play_demonstrations(rollout, demonstrate, chat, list(questions), (0,), size)


# ---------------------------------------------------------------------- demonstrations


@pytest.mark.parametrize("scheme", [TwoTurn(), ReAct(), ReAct(think="required"), ReAct(3, "boxed")])
def test_random_play_calls_with_valid_arguments_and_gives_the_right_answer(chat, scheme):
    (attempts,) = play(chat, RandomPlay(scheme), scheme, size=40)
    turns = [turn for attempt in attempts for turn in attempt.turns]
    assert all(turn.reading.format_error is None for turn in turns)
    assert all(attempt.answer == "Paris" for attempt in attempts)
    calls = [call for turn in turns for call in turn.reading.calls]
    # the toolbox has checked every argument by the schema of `Page`
    assert all(result.ok for turn in turns for result in turn.results)
    assert len(calls) >= 40
    assert {call.arguments["kind"] for call in calls} == {"city", "country"}
    assert {call.arguments["most"] for call in calls} == {2, 3, 4}
    assert {call.arguments["other"] for call in calls} == {None, 7}
    queries = {call.arguments["query"] for call in calls}
    assert len(queries) > 5
    assert all(
        query in QUESTION.text or query in "Paris is the capital of France." for query in queries
    )
    lengths = {len(attempt.turns) for attempt in attempts}
    assert lengths == ({2} if scheme.max_turns == 2 else set(range(2, scheme.max_turns + 1)))


SCHEMAS = [
    {"$ref": "#/$defs/place"},
    {"type": "array", "items": {"type": "string"}, "maxItems": 0},
    {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3},
    {"type": "string", "minLength": 90},
    {"type": "string", "maxLength": 2},
    {"type": "number", "maximum": -5},
    {"type": ["integer", "null"], "minimum": 3},
    {"oneOf": [{"type": "boolean"}, {"type": "object", "properties": {"a": {"const": 1}}}]},
    {"type": "string", "format": "date", "pattern": "^[0-9]{4}-"},
    {"items": {"$ref": "#/$defs/tree"}},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_random_arguments_fit_schemas_of_many_kinds(chat, schema):
    place = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    tree = {"properties": {"left": {"$ref": "#/$defs/tree"}, "x": True}, "required": ["x"]}

    class Odd(Page):
        parameters = {
            "type": "object",
            "properties": {"odd": schema},
            "required": ["odd"],
            "$defs": {"place": place, "tree": tree},
        }

    (attempts,) = play(chat, RandomPlay(ReAct()), tools=[Odd()], size=20)
    results = [result for attempt in attempts for turn in attempt.turns for result in turn.results]
    assert len(results) >= 20
    assert all(result.ok for result in results)


def test_a_schema_that_random_values_do_not_fit_is_named(chat):
    class Odd(Page):
        parameters = {"properties": {"code": {"pattern": "^[0-9]{9}$"}}, "required": ["code"]}

    with pytest.raises(RecipeError, match="no arguments that the parameters of the tool 'look' al"):
        play(chat, RandomPlay(ReAct()), tools=[Odd()])


def test_random_play_recites_no_answer_that_it_has_not_read(chat):
    class Elsewhere(Page):
        def run(self, calls):
            return [ToolResult("Oslo is a city in Norway, and no other.") for _ in calls]

    asked = Question("q", "Where?", ("Sweden", "No", "Norway"))
    (attempts,) = play(chat, RandomPlay(ReAct()), tools=[Elsewhere()], questions=[asked], size=10)
    assert {attempt.answer for attempt in attempts} <= {"No", "Norway"}  # whole words of the result
    asked = Question("q", "Where?", ("Sweden",))
    (attempts,) = play(chat, RandomPlay(ReAct()), tools=[Elsewhere()], questions=[asked], size=10)
    assert all(attempt.answer in "Oslo is a city in Norway, and no other." for attempt in attempts)
    # what occurs is decided by the question's rule
    asked = Question("q", "How many?", ("1.5",), rule="number")

    class Fifteen(Page):
        def run(self, calls):
            return [ToolResult("It has 15 rooms.") for _ in calls]

    (attempts,) = play(chat, RandomPlay(ReAct()), tools=[Fifteen()], questions=[asked], size=10)
    assert all(attempt.answer in "It has 15 rooms." for attempt in attempts)
    # where there is nothing to read from, the form of an answer is shown by an accepted one
    ((attempt,),) = play(chat, RandomPlay(ReAct()), tools=[], questions=[asked])
    assert attempt.answer == "1.5"


class Fussy(Page):
    """Takes a third of the calls that fit its schema, or none."""

    name = "fussy"

    def __init__(self, wants=(4,)):
        self.wants = wants

    def run(self, calls):
        takes = [call.arguments["most"] in self.wants for call in calls]
        return [ToolResult("Paris." if taken else "No.", ok=taken) for taken in takes]


def demonstrated(model, tool, by=None):
    rollout = Rollout(ReAct(3), [tool], max_turn_tokens=400, max_tokens=4000)
    asked = [replace(QUESTION, id=str(n)) for n in range(60)]
    module = MTGRPO(Policy(str(model)), rollout, [Answered()])
    return demonstrations(module, asked, by or RandomPlay(ReAct(3)))


def test_random_play_answers_only_after_a_call_that_worked(tiny_model):
    shown = demonstrated(tiny_model, Fussy())
    assert {attempt.answer for attempt in shown} == {"Paris"}
    assert all(any(result.ok for result in attempt.results) for attempt in shown)
    assert any(not attempt.results[0].ok for attempt in shown)  # it called again
    # two calls fail in (2/3)^2 = .44 of the attempts
    assert 20 <= len(shown) <= 47


@pytest.mark.parametrize("by", [None, lambda attempt, rng: RandomPlay(ReAct(3))(attempt, rng)])
def test_demonstrations_whose_calls_all_fail_are_refused(tiny_model, by):
    with pytest.raises(RecipeError, match=r"none of the \d+ calls .* first reply was 'No\.'"):
        demonstrated(tiny_model, Fussy(wants=()), by)


def test_random_play_acts_in_an_environment_whatever_other_tools_exist(chat):
    scheme = Action(4, "text", "step")
    tools = [Page(), Environment("turnrl_environments.lake.Lake")]
    asked = Question("q", "Cross.", ("Paris",), metadata={"seed": 3})  # it has an answer, too
    (attempts,) = play(chat, RandomPlay(scheme), scheme, tools, [asked], size=12)
    called = {
        call.name for attempt in attempts for turn in attempt.turns for call in turn.reading.calls
    }
    assert called == {"step"}
    assert all(attempt.answer is None for attempt in attempts)


def test_a_long_text_without_spaces_is_cut(chat):
    class Pages(Page):
        parameters = {"type": "object", "properties": {"query": {"type": "string"}}}

        def run(self, calls):
            return [ToolResult("\u4eac" * 3000) for _ in calls]

    (attempts,) = play(
        chat, RandomPlay(ReAct()), tools=[Pages()], size=5, max_result_tokens=3000, max_tokens=30000
    )
    assert all(attempt.ended_by == "answer" for attempt in attempts)


def test_a_turn_ends_at_the_first_token_that_ends_one(chat):
    whole = chat.encode_turn("a<|im_end|>b", ())
    assert [token in chat.end_ids for token in whole].index(True) == len(whole) - 1
    assert chat.decode_turn(whole) == "a"


def test_no_more_demonstrations_are_under_way_than_asked_for(chat):
    under_way, most = 0, 0

    async def demonstrate(attempt, rng):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return Reading(answer="x")

    rollout = Rollout(ReAct(), [], max_tokens=4000)
    play_demonstrations(rollout, demonstrate, chat, [QUESTION] * 10, (0,), at_once=3)
    assert most == 3


def test_demonstrations_are_the_same_for_the_same_seed_and_differ_among_attempts(chat):
    def texts():
        (attempts,) = play(chat, RandomPlay(ReAct()), size=6)
        return [[turn.text for turn in attempt.turns] for attempt in attempts]

    first = texts()
    assert first == texts()
    assert len({str(turns) for turns in first}) == 6


def test_a_demonstration_yields_the_same_tokens_as_a_policy_that_wrote_it(chat):
    texts = [
        '<tool>{"name": "look", "args": {"query": "x"}}</tool> and more',
        "<answer>Paris</answer>",
    ]
    from turnrl.testing import ScriptedEngine

    scheme = TwoTurn()
    ((shown,),) = play(chat, lambda attempt, rng: texts[len(attempt.turns)], scheme, [Echo()])
    # a model stops at the end of a stop string, and nothing ends the turn but that
    cut = texts[0].removesuffix(" and more")
    engine = ScriptedEngine(chat.tokenizer, lambda session, turn: [cut, texts[1]][turn])
    rollout = Rollout(scheme, [Echo()], max_turn_tokens=400, max_tokens=4000)
    with rollout.running_tools():
        ((wrote,),) = rollout.play(engine, chat, [QUESTION], 1, (0,))
    assert shown.token_rows == wrote.token_rows
    assert shown.turns == wrote.turns
    # without a stop string the token that ends a turn is written too
    ((plain,),) = play(chat, lambda attempt, rng: "left", Action(1, "text", "echo"), [Echo()])
    ids, asked = plain.token_rows[0]
    written = [i for i, mine in zip(ids, asked, strict=True) if mine]
    assert written[-1] == chat.end_of_turn
    assert chat.decode_turn(written) == "left"


def test_a_demonstrator_may_be_async_return_a_reading_and_see_results(chat):
    seen = []

    async def demonstrate(attempt, rng):
        seen.append([result.content for turn in attempt.turns for result in turn.results])
        assert isinstance(rng, random.Random)
        if attempt.turns:
            return Reading(answer=attempt.question.answers[0])
        return Reading((ToolCall("echo", {"text": "hello <answer>"}),))

    ((played,),) = play(chat, demonstrate, ReAct(), [Echo()])
    assert played.answer == "Paris"
    assert played.turns[0].reading.calls[0].arguments == {"text": "hello <answer>"}
    assert seen == [[], [played.turns[0].results[0].content]]


@pytest.mark.parametrize(
    ("gives", "error", "message"),
    [
        (lambda attempt, rng: 1 / 0, PluginError, "division by zero"),
        (lambda attempt, rng: None, PluginError, "gave None"),
        (lambda attempt, rng: " ", PluginError, "gave ' '"),
        (
            lambda attempt, rng: "x " * 500,
            RecipeError,
            "more than model.rollout.max_turn_tokens = 400",
        ),
        (lambda attempt, rng: Reading((ToolCall("a"), ToolCall("b"))), RecipeError, "has one call"),
    ],
)
def test_a_demonstrator_that_gives_no_turn_is_named(chat, gives, error, message):
    with pytest.raises(error, match=message) as raised:
        play(chat, gives, TwoTurn())
    assert "demonstrat" in str(raised.value).lower()


def test_the_error_for_a_segmenter_that_cannot_write_turns_names_the_method(chat):
    class Bare(Segmenter):
        max_turns = 2

        def prompt(self, question, tools):
            return [{"role": "user", "content": question.text}]

        def read(self, text, turn, cut):
            return Reading(answer=text.strip() or None, format_error=None if text.strip() else "no")

        def observe(self, reading, results):
            return [{"role": "user", "content": "go on"}]

    with pytest.raises(
        RecipeError, match=r"Bare does not say how a turn is written\. Define write"
    ):
        play(chat, RandomPlay(Bare()), Bare())

    class Wrong(Bare):
        tags = ("say",)

        def read(self, text, turn, cut):
            return Reading(answer=None if cut else text.strip() or None, format_error="no form")

        def write(self, reading, thought=""):
            return f"{reading.answer} or so"

    with pytest.raises(RecipeError, match="finds no turn 1 that Wrong can write and reads again"):
        play(chat, RandomPlay(Wrong()), Wrong(), [])
    with pytest.raises(AssertionError, match=r"Wrong.write\(.*which it reads as"):
        check_segmenter(Wrong(), 10)


# ---------------------------------------------------------------------------- learning


class Look(L.Callback):
    """Keeps the loss and the gradient of a step."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.loss = float(trainer.callback_metrics["train/loss"])
        self.gradient = {n: p.grad.clone() for n, p in pl_module.named_parameters()}


def test_the_loss_is_the_mean_cross_entropy_of_marked_tokens_in_one_or_many_passes(
    tiny_model,
):
    draw = random.Random(0)
    lines = []
    for length in (9, 14, 23, 30):
        ids = [draw.randrange(5, 60) for _ in range(length)]
        lines.append((ids, [n > length // 2 for n in range(length)]))
    for budget in (None, 24):
        policy = Policy(str(tiny_model)).build()
        policy.load()
        lesson = Supervised(1e-3, policy)
        lesson.budget = budget
        look = Look()
        trainer = L.Trainer(
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            callbacks=[look],
        )
        loader = torch.utils.data.DataLoader([lines], batch_size=None)
        fresh = Policy(str(tiny_model)).build()
        fresh.load()
        naive = []
        for ids, asked in lines:
            logits = fresh.network(torch.tensor([ids])).logits[0].float()
            logp = logits.log_softmax(-1)
            naive += [logp[n - 1, ids[n]] for n, mine in enumerate(asked) if mine]
        loss = -torch.stack(naive).mean()
        loss.backward()
        trainer.fit(lesson, loader)
        assert look.loss == pytest.approx(loss.item(), rel=1e-5)
        wanted = {f"policy.{n}": p.grad for n, p in fresh.named_parameters()}
        for name, gradient in look.gradient.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5)


LAKE = {
    "seed_everything": 0,
    "model": {
        "policy": {"model": "package://turnrl_atlas/starter"},
        "rollout": {
            "segmenter": {
                "class_path": "Action",
                "init_args": {"max_turns": 6, "form": "text", "instructions": ""},
            },
            "tools": [
                {
                    "class_path": "Environment",
                    "init_args": {"environment": "turnrl_environments.lake.Lake"},
                }
            ],
            "max_turn_tokens": 8,
            "max_tokens": 512,
        },
        "rewards": ["EnvironmentReward", "EnvironmentOutcome"],
        "group_size": 4,
    },
    "data": {
        "train": {"class_path": "Seeds"},
        "val": {"class_path": "Seeds"},
        "questions_per_iteration": 4,
        "val_limit": 16,
    },
    "trainer": {"max_epochs": 1, "accelerator": "cpu", "callbacks": []},
}
SHORT = ["--steps", "30", "--batch_size", "8", "--lr"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
@pytest.mark.parametrize(("lora", "rate"), [
    (None, "2e-3"), pytest.param({"r": 16}, "5e-3", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_policy_that_never_calls_calls_after_a_warm_up_and_a_run_begins_with_it(
    tmp_path, monkeypatch, capsys, lora, rate
):
    monkeypatch.chdir(tmp_path)
    recipe = json.loads(json.dumps(LAKE))
    recipe["model"]["policy"]["lora"] = lora
    save(recipe, "lake.yaml")
    assert main(["warmup", "lake.yaml", "--to", "warm", *SHORT, rate]) == 0
    printed = capsys.readouterr().out
    assert "begin with it: turnrl fit lake.yaml --model.policy.model warm" in printed
    assert Path("warm", "adapter_config.json").is_file() == (lora is not None)
    assert "-- turn 2" in Path("warm/demonstrations.txt").read_text()
    assert not Path("runs").exists()
    assert main(["fit", "lake.yaml", "--model.policy.model", "warm"]) == 0
    assert column("runs/lake", "train/tool_execution")[0] > 0.8
    # its own adapter, exported anew, says which base it is of
    if lora is not None:
        config = json.loads(Path("runs/lake/version_0/adapter/adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "package://turnrl_atlas/starter"


def test_mistakes_in_warm_up_options_are_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(LAKE, "lake.yaml")
    go = ["warmup", "lake.yaml"]
    assert "--to does not say where" in fails(capsys, go)
    Path("keep").mkdir()
    Path("keep/README.md").write_text("my own notes")
    assert "--to is 'keep', which holds README.md" in fails(capsys, [*go, "--to", "keep"])
    for option, value in (
        *(("--steps", "0"), ("--lr", "0"), ("--batch_size", "1.5")),
        *(("--by", "nowhere.demonstrate"), ("--by", "json.decoder"), ("--trainer.devices", "2")),
        ("--trainer.precision", "bf16-mixed"),
    ):
        message = fails(capsys, [*go, "--to", "warm", option, value])
        assert option.rpartition("--")[2].removeprefix("trainer.") in message
    recipe = json.loads(json.dumps(LAKE))
    recipe["model"]["rollout"]["max_tokens"] = 60  # room for a prompt, and for one turn
    recipe["model"]["rollout"]["tools"][0]["init_args"]["options"] = {"ice": 1.0}
    save(recipe, "small.yaml")
    message = fails(capsys, ["warmup", "small.yaml", "--to", "warm", *SHORT, "1e-3"])
    assert "ran out of tokens: model.rollout.max_tokens is 60. Raise it." in message
    assert "Did you mean steps" in fails(capsys, [*go, "--to", "warm", "--stepz", "3"])


def test_a_warm_up_accepts_custom_demonstrations(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("shown.py").write_text(
        "import random\n"
        "def demonstrate(attempt, rng):\n"
        "    return '<action>down</action>' if attempt.turns else 'now <action>right</action>'\n"
    )
    recipe = json.loads(json.dumps(LAKE))
    recipe["model"]["rollout"]["segmenter"]["init_args"]["form"] = "tag"
    save(recipe, "lake.yaml")
    options = ["--steps", "1", "--batch_size", "2"]
    go = ["warmup", "lake.yaml", "--to", "warm", "--by", "shown.demonstrate", *options]
    message = fails(capsys, go)
    assert re.search(
        r"a turn of \d+ tokens on question .* model\.rollout\.max_turn_tokens = 8\. Raise", message
    )
    assert main([*go, "--model.rollout.max_turn_tokens", "40"]) == 0
    assert "now <action>right</action>" in Path("warm/demonstrations.txt").read_text()


def test_a_warm_up_in_python_takes_a_function_and_a_trainers_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(LAKE, "lake.yaml")
    built = build(["lake.yaml"])
    mine = WarmUp(steps=1, batch_size=2, by=lambda attempt, rng: "right")
    with pytest.raises(RecipeError, match="trainer has 'logger', which a warm-up sets itself"):
        warm_up(built.module, built.data, "warm", mine, trainer={"logger": True})
    with pytest.raises(RecipeError, match=r"^lr is 0; it must be at least 1e-12"):
        WarmUp(lr=0)
    losses = warm_up(built.module, built.data, "warm", mine, trainer={"accelerator": "cpu"})
    assert len(losses) == 1
    assert "right" in Path("warm/demonstrations.txt").read_text()


# ----------------------------------------------------------------- an adapter as model


def moved(policy, seed=0):
    """A policy whose adapter is random."""
    policy.load()
    draw = torch.Generator().manual_seed(seed)
    for parameter in policy.trainable_parameters().values():
        parameter.data.add_(torch.randn(parameter.shape, generator=draw) * 0.02)
    return policy


def logprobs_of(policy):
    """Its log-probabilities of four fixed tokens."""
    row = ([5, 6, 7, 8, 9, 10], [False] * 2 + [True] * 4)
    return policy.score_tokens([row])[0].logprobs


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_an_adapter_is_trained_further_and_is_the_reference(tiny_model, tmp_path, quantization):
    def made(model, **lora):
        return Policy(str(model), quantization, Lora(r=4, **lora)).build()

    first = moved(made(tiny_model))
    folder = turnrl.export(first, tmp_path / "adapter")
    again = made(folder)
    again.load()
    # a checkpoint says which adapter it began with, because that one is the reference
    differs = {k for k, v in again.files.identity.items() if first.files.identity[k] != v}
    assert differs == {"starting adapter"}
    torch.testing.assert_close(logprobs_of(again), logprobs_of(first))
    with again.reference():
        torch.testing.assert_close(logprobs_of(again), logprobs_of(first))
    moved(again, 1)
    assert (logprobs_of(again) - logprobs_of(first)).abs().max() > 0.01
    with again.reference():
        torch.testing.assert_close(logprobs_of(again), logprobs_of(first))
    with first.reference():  # a fresh adapter's reference is the base
        base = logprobs_of(first)
    assert (base - logprobs_of(first)).abs().max() > 0.01
    # what comes of it is an adapter of the base too, and not of the adapter
    last_one = made(turnrl.export(again, tmp_path / "last"))
    last_one.load()
    torch.testing.assert_close(logprobs_of(last_one), logprobs_of(again))
    assert last_one.folder == again.folder == str(tiny_model)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_an_adapter_with_dropout_loads_and_its_reference_has_none(tiny_model, tmp_path):
    folder = turnrl.export(
        moved(Policy(str(tiny_model), lora=Lora(r=4)).build()), tmp_path / "adapter"
    )
    begun = Policy(str(folder), lora=Lora(r=4, dropout=0.5)).build()
    begun.load()
    assert begun.way.share  # as for a policy without dropout
    row = ([5, 6, 7, 8, 9, 10], [False] * 2 + [True] * 4)
    (layout,) = (layout for _, layout in begun.forward_passes([row], 100))
    begun.train()
    with torch.no_grad(), begun.reference():
        first, again = (begun(layout).logprobs for _ in range(2))
    assert begun.training
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    torch.testing.assert_close(
        first, logprobs_of(begun)
    )  # in eval mode, and nothing has been learned


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_gradients_are_the_same_with_the_reference_between_forward_and_backward(
    tiny_model, tmp_path
):
    folder = turnrl.export(
        moved(Policy(str(tiny_model), lora=Lora(r=4)).build()), tmp_path / "adapter"
    )
    row = ([5, 6, 7, 8, 9, 10], [False] * 2 + [True] * 4)
    gradients = []
    for checkpointing, between in ((False, False), (False, True), (True, True)):
        policy = Policy(str(folder), lora=Lora(r=4), gradient_checkpointing=checkpointing).build()
        policy.load()
        moved(policy, 1)
        (layout,) = (layout for _, layout in policy.forward_passes([row], 100))
        loss = policy(layout).logprobs.sum()
        if between:
            with torch.no_grad(), policy.reference():
                policy(layout)
        loss.backward()
        gradients.append([p.grad for p in policy.trainable_parameters().values()])
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_a_folder_holds_a_model_or_an_adapter_and_not_both(tiny_model, tmp_path):
    whole, part = Policy(str(tiny_model)).build(), Policy(str(tiny_model), lora=Lora(r=4)).build()
    whole.load()
    part.load()
    turnrl.export(whole, tmp_path / "whole")
    turnrl.export(part, tmp_path / "part")
    with pytest.raises(RecipeError, match="holds a whole model, and what is trained is an adapter"):
        turnrl.export(part, tmp_path / "whole")
    with pytest.raises(RecipeError, match="holds an adapter, and what is trained is a whole model"):
        turnrl.export(whole, tmp_path / "part")
    (tmp_path / "part" / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match="holds a whole model and an adapter"):
        _ = Policy(str(tmp_path / "part"), lora=Lora(r=4)).build().folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_a_run_does_not_resume_with_another_adapter_as_its_reference(recipe, tiny_model, capsys):
    for seed, name in enumerate(("one", "two")):
        turnrl.export(moved(Policy(str(tiny_model), lora=Lora(r=4)).build(), seed), name)
    recipe["model"]["policy"] = {"model": "one", "lora": {"r": 4}}
    recipe["model"]["objective"] = {"kl_coef": 0.1}
    save(recipe)
    assert main(["fit", "recipe.yaml"]) == 0
    go = ["fit", "recipe.yaml", "--ckpt_path", "last", "--trainer.max_epochs", "3"]
    assert "its starting adapter is" in fails(capsys, [*go, "--model.policy.model", "two"])
    assert main(go) == 0


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_an_adapter_that_does_not_fit_is_refused_before_weights_are_loaded(tiny_model, tmp_path):
    folder = turnrl.export(
        moved(Policy(str(tiny_model), lora=Lora(r=4)).build()), tmp_path / "adapter"
    )
    for lora in (None, Lora(r=8), Lora(r=4, alpha=8)):
        with pytest.raises(RecipeError, match=r"Set model.policy.lora: \{r: 4, alpha: 32\}"):
            _ = Policy(str(folder), lora=lora).build().folder
    with pytest.raises(
        RecipeError, match=r"Set model\.policy\.lora\.target_modules as in its adapter"
    ):
        Policy(str(folder), lora=Lora(r=4, target_modules=["q_proj"])).build().load()
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "../../gone/away"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(
        RecipeError, match=r"is an adapter of '../../gone/away', which is not there"
    ):
        _ = Policy(str(folder), lora=Lora(r=4)).build().folder


# ---------------------------------------------------------------------------- the lake


def test_steps_on_the_lake_pay_the_difference_of_a_potential(chat):
    draw = random.Random(0)
    goals = falls = 0
    for seed in range(300):
        lake = Lake()
        shown = lake.reset(seed)
        assert shown == Lake().reset(seed)
        # the shortest safe way by an independent reading of the map: all ways of so many moves
        size, places = lake.size, {lake.at}
        moves = 0
        while lake.goal not in places:
            moves += 1
            near = {p + 1 for p in places if (p + 1) % size}
            near |= {p - 1 for p in places if p % size}
            near |= {p + size for p in places if p + size < size**2}
            near |= {p - size for p in places if p >= size}
            places |= {p for p in near if lake.places[p // size][p % size] != "H"}
        assert moves == lake.way_from_start
        assert 6 <= moves <= 8
        earned = 0.0
        for _ in range(60):
            result = lake.step(draw.choice(["left", "down", "right", "up"]))
            earned += result.reward
            if lake.at in lake.ways:
                assert math.isclose(
                    earned, 1 - lake.ways[lake.at] / lake.way_from_start, abs_tol=1e-9
                )
            else:
                assert result.reward <= 1e-9
                assert earned <= 1e-9
            if result.done:
                break
        goals += lake.get_reward()
        falls += bool(result.done and not lake.get_reward())
        assert lake.get_reward() == float("in the goal" in result.content)
    assert goals > 10
    assert falls > 100


def test_the_lake_says_where_the_ice_is_and_where_the_goal_is():
    lake = Lake()
    lake.reset(5)
    lake.places = [*map(list, ("FHF", "SFG", "FFF"))]
    lake.size, lake.at, lake.goal = 3, 3, 5
    # private, because a public method of an environment is an action that the policy may take
    assert lake._seen() == "ice down, right, up; goal 2 right"
    lake.at = 4
    assert lake._seen() == "ice left, down, right; goal 1 right"
    with pytest.raises(
        RecipeError, match=r"no map of Lake.size 2 with Lake.ice 0.9 has a way of 9"
    ):
        Lake(2, 0.9, 9).reset(0)
    assert [*Environment("turnrl_environments.lake.Lake").tools] == ["step"]


# ---------------------------------------------------------------------------- the page

PAGE = "docs/howto/warmup.md"


def test_a_scheme_that_writes_as_on_the_page():
    (code,) = (p.text for p in blocks(PAGE) if "def write(self" in p.text)
    names = {}
    exec(code, names)

    class Lines(Segmenter):
        max_turns = 3
        write = names["write"]

        def prompt(self, question, tools):
            return [{"role": "user", "content": question.text}]

        def read(self, text, turn, cut):
            kind, _, content = text.partition(": ")
            if kind == "answer" and content and not cut:
                return Reading(answer=content)
            if kind == "look":
                return Reading((ToolCall("look", {"query": content}),))
            return Reading(format_error="neither")

        def observe(self, reading, results):
            content = "\n".join(result.content for result in results)
            return [{"role": "user", "content": content or str(reading.format_error)}]

    scheme = Lines()
    assert scheme.write(Reading(answer="Paris")) == "answer: Paris"
    reading = Reading((ToolCall("look", {"query": "France"}),))
    assert scheme.read(scheme.write(reading), 0, False) == reading


@pytest.mark.slow
def test_the_python_of_the_page_warms_up(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = (p.text for p in blocks(PAGE) if "warm_up(" in p.text)
    small = "lr=1e-3, steps=20, batch_size=8"
    assert "lr=1e-3" in code
    exec(code.replace("lr=1e-3", small), {})
    assert float(capsys.readouterr().out.split()[-1]) < 3
    assert Path("lake_starter/model.safetensors").is_file()


@pytest.mark.slow
def test_the_frozen_lake_of_the_page_is_learned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = [line for p in blocks(PAGE) for line in p.text.splitlines() if "frozen_lake" in line]
    warm, fit = [line.split()[1:] for line in commands if line.startswith("turnrl ")][:2]
    assert main(warm) == 0
    assert main(fit) == 0
    assert column("runs/frozen_lake", "val/tool_execution")[0] > 0.9
    outcomes = column("runs/frozen_lake", "val/reward/outcome")
    assert outcomes[0] < 0.1
    assert max(outcomes) > 0.25
