"""The rehearsal of `turnrl doctor`: what it calls tools with, and what it leaves behind."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from transformers import FalconConfig, GPT2Config, GPTNeoXConfig, LlamaConfig

from rollouts import Counter
from runs import data, make_module, rows, trainer, weights
from turnrl import (
    FunctionReward,
    QuestionData,
    ToolResult,
    ToolSpec,
)
from turnrl.cli import main
from turnrl.plugin.errors import PluginError
from turnrl.policy.settings import Lora
from turnrl.types import Start, ToolSession
from turnrl_doctor.checks import Rehearsal
from turnrl_doctor.miniature import small_network
from turnrl_doctor.tools import example_arguments
from turnrl_estimators import Branched, TurnCritic
from turnrl_rewards import (
    JudgeServer,
    LLMJudge,
    LLMJudgeTurn,
)
from turnrl_slots import Slots
from worlds import Aims, Echo

CPU = torch.device("cpu")
TEXT = "What is the capital of Peru?"


def answered(trajectory):
    return float(trajectory.answer in trajectory.question.answers)


def rehearse(module, data):
    """What the rehearsal reports, by name."""
    return {finding.name: finding for finding in Rehearsal().run(Start(CPU, module, data))}


def with_tool(model, tool, questions=None):
    """The same, of a recipe with one tool."""
    module = make_module(model)
    module.rollout = replace(module.rollout, tools=[tool])
    return rehearse(module, data() if questions is None else questions)


# ------------------------------------------------------------------------- arguments

TREE = {"$ref": "#/$defs/node", "$defs": {"node": {
    "type": "object", "required": ["name"],
    "properties": {"name": {"type": "string"}, "left": {"$ref": "#/$defs/node"}},
}}}  # fmt: skip
SCHEMAS = [
    {"text": {"type": "string", "maxLength": 5}},
    {"text": {"type": "string", "minLength": 60}},
    {"text": {"type": "string", "pattern": "^[0-9]$"}},
    {"unit": {"enum": ["metre", "mile"]}, "kind": {"const": 3}},
    {"n": {"type": "integer", "exclusiveMinimum": -3, "maximum": -2}},
    {"n": {"type": "number", "minimum": 0.25, "exclusiveMaximum": 0.5}},
    {"yes": {"type": "boolean"}, "none": {"type": "null"}, "any": True},
    {"one": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 0.5}]}},
    {"tree": TREE["$defs"]["node"]},
    {"a": {"anyOf": [{"const": "x"}]}, "b": {"$ref": "#/properties/a/anyOf/0"}},
]


@pytest.mark.parametrize("properties", SCHEMAS, ids=str)
def test_arguments_fit_the_schema_whole_and_as_short_as_it_allows(properties):
    schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    schema |= {"$defs": TREE["$defs"], "additionalProperties": False}
    spec = ToolSpec("try", "Tries.", schema)
    made = example_arguments(spec, TEXT)
    assert made
    assert all(Draft202012Validator(schema).is_valid(arguments) for arguments in made)
    assert set(made[0]) == set(properties)
    assert set(made[-1]) == set(schema["required"])


def test_rehearsal_arguments_come_from_the_tools_examples_or_its_schema():
    query = {"type": "string", "examples": ["time zone of Utrecht"]}
    schema = {"type": "object", "properties": {"query": query, "n": {"default": 4}}}
    of_schema = [{"query": "time zone of Utrecht", "n": 4}, {}]
    assert example_arguments(ToolSpec("find", "Finds.", schema), TEXT) == of_schema
    examples = [{"query": "1 + 2"}]
    assert example_arguments(ToolSpec("find", "Finds.", schema, examples), TEXT) == examples
    assert example_arguments(ToolSpec("look", "Looks.", {"type": "object"}), TEXT) == [{}]
    assert example_arguments(ToolSpec("look", "Looks.", {}), TEXT) == [{}]
    assert example_arguments(ToolSpec("grow", "Grows.", TREE), TEXT)[-1] == {"name": TEXT}


def test_an_example_that_does_not_fit_and_a_schema_without_arguments_are_refused():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    with pytest.raises(PluginError, match=r"example \{'n': 'x'\}, which does not fit its par"):
        example_arguments(ToolSpec("add", "Adds.", schema, [{"n": "x"}]), TEXT)
    code = {"type": "string", "pattern": "^XQ-[0-9]{4}$"}
    odd = {"properties": {"code": code}, "required": ["code"]}
    lost = {"properties": {"code": {"$ref": "#/anyOf/9"}}, "required": ["code"], "anyOf": [True]}
    for schema in (odd, lost):
        with pytest.raises(PluginError, match=r"found no arguments .*Give it examples"):
            example_arguments(ToolSpec("open", "Opens.", schema), TEXT)


def test_a_tool_that_cannot_be_called_is_a_warning(tiny_model):
    class Vault(Echo):
        parameters = {
            "type": "object",
            "properties": {"code": {"type": "string", "pattern": "^XQ-[0-9]{4}$"}},
            "required": ["code"],
        }

    report = with_tool(tiny_model, Vault())
    assert report["tool echo"].status == "warn"
    assert "examples" in report["tool echo"].advice
    assert report["learning"].status == "pass"
    Vault.examples = ["capital of Peru"]
    report = with_tool(tiny_model, Vault())
    assert report["tool echo"].status == "warn"
    assert "'capital of Peru'" in report["tool echo"].text
    Vault.examples = [{"code": "XQ-1234", "text": "abc"}]
    report = with_tool(tiny_model, Vault())
    assert report["tool echo"].text.startswith("6 of 6 calls succeed")


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (None, "fail", "one ToolResult per call, whose content is a text"),
        (" \n", "warn", "calls succeed, but every result is empty"),
    ],
)
def test_a_result_without_text_is_reported(tiny_model, content, status, text):
    class Speechless(Echo):
        def run(self, calls):
            return [ToolResult(content) for _ in calls]

    finding = with_tool(tiny_model, Speechless())["tool echo"]
    assert finding.status == status
    assert text in finding.text


def test_a_tool_is_called_with_the_text_of_the_question_that_its_session_is_for(tiny_model):
    class Heard(Echo):
        heard = []

        def run(self, calls):
            self.heard += [call.arguments["text"] for call in calls]
            return super().run(calls)

    asked = [{"id": "1", "question": f"{role}?", "answers": ["it"]} for role in ("train", "val")]
    with_tool(tiny_model, Heard(), QuestionData(train=asked[:1], val=asked[1:]))
    assert Heard.heard[:4] == ["train?", "train?", "val?", "val?"]


BAD = """
import json
from turnrl import OutcomeReward, TurnReward
from worlds import Echo

class Bad(Echo):
    def run(self, calls):
        return [helped(call) for call in calls]

def helped(call):
    return json.loads("{" + call.name)  # line 11

class Payless(OutcomeReward):
    def score(self, trajectory):
        return trajectory.pay  # line 15

class Short(TurnReward):
    def score(self, trajectory):
        return 0.0

class Patient(OutcomeReward):
    async def score(self, trajectory):
        return 0.0
"""


@pytest.fixture
def bad(tmp_path, monkeypatch):
    (tmp_path / "bad.py").write_text(BAD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bad", raising=False)
    yield importlib.import_module("bad")
    del sys.modules["bad"]


def test_a_failure_in_a_tool_ends_with_the_line_of_its_own_code(tiny_model, bad):
    finding = with_tool(tiny_model, bad.Bad())["tool echo"]
    assert finding.status == "fail"
    assert "(Bad) raised JSONDecodeError: " in finding.text
    assert finding.text.endswith(" (bad.py:11)")


def test_a_failure_in_a_reward_is_named_with_its_line(tiny_model, bad):
    module = make_module(tiny_model)
    module.rewards[:] = [bad.Payless(), bad.Short(), *module.rewards]
    report = rehearse(module, data())
    assert report["reward Payless"].text.endswith("has no attribute 'pay' (bad.py:15)")
    assert "takes 2 positional arguments but 3 were given" in report["reward Short"].text
    assert "learning" not in report


def test_examples_that_all_fail_are_a_warning(tiny_model):
    class Locked(Echo):
        def run(self, calls):
            return [ToolResult("locked", ok=False) for _ in calls]

    # made-up arguments may be no use
    assert with_tool(tiny_model, Locked())["tool echo"].status == "pass"
    Locked.examples = [{"text": "open"}]
    finding = with_tool(tiny_model, Locked())["tool echo"]
    assert (finding.status, finding.advice) == ("warn", "Correct its examples, or the tool.")
    assert finding.text.startswith("no call succeeds")


# ------------------------------------------------------------------------- rehearsals of parts


def test_a_rehearsal_that_is_not_a_context_of_its_part_is_named(tiny_model):
    class Bare(Echo):
        def rehearsal(self):
            return self

    class Empty(Echo):
        @contextlib.contextmanager
        def rehearsal(self):
            yield

    class Untidy(Echo):
        @contextlib.contextmanager
        def rehearsal(self):
            yield self
            raise OSError("the folder is gone")

    for tool in (Bare(), Empty()):
        finding = with_tool(tiny_model, tool)["tool echo"]
        assert finding.status == "fail"
        assert f"rehearsal of {type(tool).__name__} must be a context" in finding.text
    with pytest.raises(OSError, match="the folder is gone"):  # which the doctor reports
        with_tool(tiny_model, Untidy())


# ------------------------------------------------------------------------- whole recipes


@pytest.mark.parametrize(
    "settings",
    [
        {"estimator": Branched(probes=1)},
        {"estimator": TurnCritic(), "policy": {"lora": Lora(r=4)}},
        {"group_size": 2},
    ],
    ids=["probes", "critic", "small groups"],
)
def test_a_recipe_of_another_kind_passes(tiny_model, settings):
    report = rehearse(make_module(tiny_model, **settings), data())
    assert {finding.status for finding in report.values()} == {"pass"}
    assert {"rewards", "sampling", "learning"} <= set(report)


@pytest.mark.parametrize(("right_at", "warned"), [(0.5, False), (1.0, True)])
def test_a_reward_that_never_reaches_its_own_right_at_is_a_warning(tiny_model, right_at, warned):
    module = make_module(tiny_model)
    module.rewards = [FunctionReward(answered, weight=0.5, right_at=right_at)]
    report = [f for f in rehearse(module, data()).values() if "right_at" in f.text]
    assert [finding.status for finding in report] == ["warn"] * warned
    if warned:
        assert report[0].text == "right_at is 1.0, and scripted attempts get at most 0.5"
        assert "weight included" in report[0].advice


def test_sessions_that_cannot_be_copied_fail_where_the_estimator_branches(tiny_model):
    class Once(Counter):
        """Its sessions cannot be copied."""

        def open(self, question):
            return ToolSession()

        def add(self, call):
            return ToolResult("added")

    module = make_module(tiny_model, estimator=Branched(probes=1))
    module.rollout = replace(module.rollout, tools=[Once()])
    report = rehearse(module, data())
    assert report["tool add"].status == "pass"
    assert report["attempts"].status == "fail"
    assert "which cannot be copied" in report["attempts"].text
    assert "sampling" not in report


def test_no_session_is_opened_for_a_question_that_is_made_up(tiny_model):
    module = make_module(tiny_model)
    module.rollout = replace(module.rollout, tools=[Aims()])
    report = rehearse(module, None)
    assert report["tool echo"].status == "warn"
    assert "learning" not in report
    assert rehearse(module, data())["tool echo"].status == "fail"


def test_a_slots_engine_is_rehearsed_small_with_its_other_options(tiny_model):
    module = make_module(tiny_model, engine=Slots(slots=999, kv_memory="900GB", attention="plain"))
    finding = rehearse(module, data())["sampling"]
    assert finding.status == "pass"


def test_an_optimiser_that_cannot_be_made_fails(tiny_model):
    def broken(weights):
        raise TypeError("no such option")

    finding = rehearse(make_module(tiny_model, optimizer=broken), data())["learning"]
    assert finding.status == "fail"
    assert "model.optimizer raised TypeError: no such option" in finding.text


def test_a_run_after_the_rehearsal_has_the_same_digits(tiny_model, tmp_path):
    def run(folder, rehearsed):
        module, questions = make_module(tiny_model), data()
        made = trainer(folder)
        if rehearsed:
            before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
            assert rehearse(module, questions)["learning"].status == "pass"
            after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
            assert bool((before[0] == after[0]).all())
            assert before[1:] == after[1:]
            assert module.policy.network is None
        made.fit(module, questions)
        return rows(folder), weights(module.policy)

    figures, learned = run(tmp_path / "plain", False)
    same, again = run(tmp_path / "rehearsed", True)
    assert figures == same
    assert torch.equal(learned, again)


def test_the_quickstart_passes_in_an_empty_folder_and_leaves_it_empty(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "quickstart"]) == 0
    out = capsys.readouterr().out
    assert "fail" not in out
    assert "calls succeed, for example search {" in out
    assert "pass  learning " in out
    assert not [*Path().iterdir()]


# ------------------------------------------------------------------------- rehearsals


@pytest.mark.parametrize("kind", [LLMJudge, LLMJudgeTurn])
def test_a_judge_is_rehearsed_without_patience_and_without_its_file(kind):
    judge = kind(JudgeServer("http://localhost:9/v1", "judge", patience_s=300, cache="verdicts.db"))
    with judge.rehearsal() as rehearsed:
        # a judge shows its server in its requests alone
        holders = [part if kind is LLMJudge else part.state for part in (judge, rehearsed)]
        servers = [holder._verdicts._server for holder in holders]
    assert [server.cache for server in servers] == ["verdicts.db", None]
    assert servers[0].patience_s == 300
    assert servers[1].patience_s <= 5


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, vocab_size=99),
        GPTNeoXConfig(hidden_size=768, num_attention_heads=12, vocab_size=99),
        GPT2Config(vocab_size=99, bos_token_id=0, eos_token_id=0),
        FalconConfig(hidden_size=256, num_attention_heads=4, vocab_size=99, num_hidden_layers=4),
    ],
    ids=lambda config: config.model_type,
)
def test_models_with_constraints_on_their_sizes_have_a_miniature(config):
    network = small_network(config)
    assert network.config.num_hidden_layers == 2
    assert network.config.num_attention_heads == config.num_attention_heads
    assert network.config.hidden_size <= config.hidden_size


def test_a_model_without_a_miniature_is_named():
    config = LlamaConfig(hidden_size=80, num_attention_heads=10, vocab_size=99, hidden_act="none")
    with pytest.raises(ValueError, match="no miniature of llama can be made"):
        small_network(config)
