"""A user's mistakes, and their messages: the key, its value, and the next step."""

from __future__ import annotations

import copy
import math
import os
import random
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import trajectories
import turnrl
from commands import fails, save
from mistakes import MISTAKES, component
from runs import make_module, trainer
from turnrl import (
    MTGRPO,
    AdvantageEstimator,
    ClippedSurrogate,
    DataError,
    OutcomeReward,
    Policy,
    QuestionData,
    RecipeError,
    Rollout,
    assign_credit,
    load_questions,
    score_group,
)
from turnrl.cli import main
from turnrl.plugin.errors import PluginError, is_finite
from turnrl.policy.settings import Lora
from turnrl.recipe.build import CLASSES
from turnrl.recipe.explain import faults
from turnrl.recipe.invocation import read_invocation
from turnrl.recipe.keys import ABSENT, SYNONYMS, unknown_key_message
from turnrl.recipe.merging import expand_variables, map_values
from turnrl.watch.recorder import Recorder
from turnrl_rewards import Number
from worlds import Answered, Echo, Idle, Letters, Numbers


def change(contents, settings):
    for path, value in settings.items():
        node, (*parents, leaf) = contents, str(path).split(".")
        for parent in parents:
            node = node[parent]
        node[path if path == 1 else leaf] = value


def command_with(mistake, recipe, name="recipe.yaml"):
    """The words of a command with a mistake, which may lie in the recipe that they name."""
    if isinstance(mistake.given, str):
        return shlex.split(mistake.given)
    contents = copy.deepcopy(recipe)
    change(contents, mistake.given)
    save(contents, name)
    return ["fit", name]


def check_message(message, mistake):
    for part in (mistake.key, mistake.value, mistake.advice):
        assert part in message
    # the next step is what the message ends with
    assert message.rindex(mistake.advice) >= message.index(mistake.key), message
    assert len(message) < 1200


MINE = """
from turnrl.engines import EngineSettings


class Mine(EngineSettings):
    def __init__(self, *, color: str = ""): ...

    def build(self): ...
"""


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name for mistake in MISTAKES])
def test_a_mistake_is_explained_by_its_key_its_value_and_the_next_step(recipe, capsys, mistake):
    Path("mine.py").write_text(MINE)
    check_message(fails(capsys, command_with(mistake, recipe)), mistake)


def set_in(contents, **settings):
    change(contents, settings)
    save(contents)


def resolved(capsys, *arguments):
    """The recipe that a command would run, with every setting."""
    assert main(["fit", *arguments, "--print_config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


# recipes as files


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model: [1\ndata: }", ("not a YAML mapping", "line 2", "Fix it;")),
        ("model:\n\tpolicy: {}", ("not a YAML mapping", "line 2", "\\t", "Fix it;")),
        ("model:\n  seed: 1\n  seed: 2", ("the key 'seed' appears twice", "line 3")),
        ("- model\n", ("it holds ['model']", "its keys are seed_everything,")),
        ("", ("it is empty", "its keys are seed_everything,")),
        (b"\x80\x05\x95\x00", ("can't decode byte 0x80", "Save it as UTF-8.")),
        ("model: !!python/name:os.system", ("python/name", "line 1", "Fix it;")),
    ],
)  # fmt: skip
def test_a_file_that_is_not_yaml_with_a_recipes_keys_is_refused(recipe, capsys, text, parts):
    Path("bad.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    message = fails(capsys, ["fit", "bad.yaml"])
    assert all(part in message for part in ("'bad.yaml'", *parts)), message


BROKEN = {"broken": "class Broken(Tool)\n", "raising": "raise RuntimeError('not today')\n"}


@pytest.mark.parametrize(("key", "module", "cause"), [
    ("model.rewards", "raising", "RuntimeError: not today"),
    ("model.engine", "broken", "SyntaxError: expected ':' (broken.py, line 1)"),
    ("trainer.callbacks", "raising", "RuntimeError: not today"),
])  # fmt: skip
def test_an_error_names_the_key_of_a_module_that_cannot_be_imported(
    recipe, capsys, module, cause, key
):
    Path(f"{module}.py").write_text(BROKEN[module])
    name = f"{module}.Broken"
    set_in(recipe, **{key: name if key == "model.engine" else [name]})
    message = fails(capsys, ["fit", "recipe.yaml"])
    assert re.search(rf"{key}(\[0\])? names '{name}', which cannot be imported", message)
    assert cause in message


def test_a_recipe_of_another_system_reads_the_same(recipe, capsys):
    wanted = resolved(capsys, "recipe.yaml")
    text = Path("recipe.yaml").read_text()
    Path("windows.yaml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    contents = resolved(capsys, "windows.yaml")
    contents["trainer"]["logger"]["init_args"]["name"] = "recipe"
    assert contents == wanted
    assert resolved(
        capsys, str(Path("recipe.yaml").rename("r\N{LATIN SMALL LETTER E WITH ACUTE}.yaml"))
    )


def test_yaml_anchors_and_merges_work_in_a_recipe(recipe, capsys):
    Path("more.yaml").write_text(
        "model:\n"
        "  estimator: &est {class_path: TurnLevel, init_args: &args {gamma: 0.5, turn_coef: 2.0}}\n"
        "  rewards:\n"
        "    - class_path: ExactMatch\n"
        "      init_args: &weight {weight: 2}\n"
        "    - class_path: WellFormed\n"
        "      init_args: {<<: *weight}\n"
    )
    section = resolved(capsys, "recipe.yaml", "more.yaml")["model"]
    assert [reward["init_args"]["weight"] for reward in section["rewards"]] == [2, 2]
    settings = section["estimator"]["init_args"]
    assert (settings["gamma"], settings["turn_coef"]) == (0.5, 2.0)


# what recipes and options say together


@pytest.mark.parametrize(
    ("arguments", "estimator"),
    [
        (["one.yaml"], ("TurnLevel", 0.5)),
        (["one.yaml", "two.yaml"], ("TurnLevel", 0.25)),
        (["two.yaml", "one.yaml"], ("TurnLevel", 0.5)),
        # another class begins anew
        (["one.yaml", "three.yaml"], ("Merged", None)),
        (["one.yaml", "--model.estimator", "Merged"], ("Merged", None)),
        (["one.yaml", "--model.estimator.class_path", "Merged"], ("Merged", None)),
        # the same by its path is the same
        (
            ["one.yaml", "--model.estimator", "turnrl.credit.estimators.TurnLevel"],
            ("TurnLevel", 0.5),
        ),
        (["one.yaml", "--model.estimator", "TurnLevel"], ("TurnLevel", 0.5)),
        # the last of two options counts
        (["one.yaml", *["--model.estimator.gamma", "0"], *["--model.estimator.gamma=1"]],
         ("TurnLevel", 1)),
        (["one.yaml", "--model.estimator.init_args.gamma", "1"], ("TurnLevel", 1)),
        # a setting may come before its class
        (["--model.estimator.gamma", "0", "--model.estimator", "TurnLevel"], ("TurnLevel", 0)),
        (["two.yaml", "--model.estimator", "TurnLevel"], ("TurnLevel", 0.25)),
        (["one.yaml", "--model.estimator", "null"], None),
    ],
)  # fmt: skip
def test_merged_recipes_and_options_build_the_expected_estimator(
    recipe, capsys, arguments, estimator
):
    save({"model": {"estimator": component("TurnLevel", gamma=0.5)}}, "one.yaml")
    save({"model": {"estimator": {"gamma": 0.25}}}, "two.yaml")
    save({"model": {"estimator": "Merged"}}, "three.yaml")
    arguments = ["recipe.yaml", *arguments]
    written = read_invocation("fit", arguments).contents["model"]["estimator"]
    built = resolved(capsys, *arguments)["model"]["estimator"]
    if estimator is None:
        assert written is built is None
        return
    written = {"class_path": written} if isinstance(written, str) else written
    for spec in (written, built):
        name, gamma = spec["class_path"].rpartition(".")[2], spec.get("init_args", {}).get("gamma")
        assert (name, None if gamma is None else float(gamma)) == estimator


def test_a_list_can_be_replaced_or_extended_and_an_added_item_configured(recipe, capsys):
    def rewards(*options):
        in_recipe = resolved(capsys, "recipe.yaml", *options)["model"]["rewards"]
        return [
            (reward["class_path"].rpartition(".")[2], reward.get("init_args", {}).get("weight"))
            for reward in in_recipe
        ]

    first = rewards()
    set_in(recipe, **{"model.rewards": [component("ExactMatch", weight=3.0), "WellFormed"]})
    old = [("ExactMatch", 3), ("WellFormed", 0.2)]
    assert rewards() == [old[0], (old[1][0], rewards()[1][1])] != first
    # a new list takes nothing from what stood in its places
    new = rewards("--model.rewards", "[WellFormed, ExactMatch]")
    assert new == [rewards()[1], ("ExactMatch", 1)]
    added = rewards("--model.rewards+", "AnswerPresent", "--model.rewards.weight", "5")
    assert added == [*rewards(), ("AnswerPresent", 5)]


def test_recipes_that_contradict_each_other_are_checked_after_merging(recipe, capsys):
    save({"model": {"estimator": component("Merged")}}, "one.yaml")
    save({"model": {"estimator": {"gamma": 0.5}}}, "two.yaml")
    message = fails(capsys, ["fit", "recipe.yaml", "one.yaml", "two.yaml"])
    assert "unknown key 'model.estimator.gamma'. Merged has the keys" in message


# processes and shells


def test_a_closed_output_pipe_ends_quietly(nursery):
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", "turnrl plugins | head -1"],
        env={
            **os.environ,
            **nursery.environment,
            "PATH": os.pathsep.join([str(nursery.bin), os.environ["PATH"]]),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unwritable_runs_folder_is_refused(recipe, capsys):
    Path("runs").write_text("a file of the user's")
    message = fails(capsys, ["fit", "recipe.yaml"])
    assert "runs is a file. Set trainer.logger.init_args.save_dir to" in message
    nowhere = ["--trainer.logger.init_args.save_dir", "/proc/nope"]
    assert "/proc takes no folder (" in fails(capsys, ["fit", "recipe.yaml", *nowhere])
    Path("scratch").symlink_to("/not/mounted")
    unmounted = ["--trainer.logger.init_args.save_dir", "scratch"]
    message = fails(capsys, ["fit", "recipe.yaml", *unmounted])
    assert "scratch is a link to /not/mounted, which is not there. Set trainer.logger" in message
    assert Path("runs").read_text() == "a file of the user's"


def test_variables_and_the_home_folder_are_filled_in_in_paths(tmp_path, monkeypatch, recipe):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("NOWHERE", raising=False)
    recipe["model"]["policy"]["model"] = "$SCRATCH/models/tiny"
    recipe["model"]["rollout"]["tools"] = [
        {"class_path": "WikiSearch", "init_args": {"index": "indexes/$SCRATCH-wiki"}}
    ]
    recipe["data"] |= {"train": "~/questions.jsonl", "val": "${SCRATCH}/val.jsonl"}
    recipe["trainer"]["logger"] = False
    texts = [
        "Costs $SCRATCH or ~/x.",
        "'(\\$[0-9]+)$'",
        "$x/y$",
        "pa$NOWHERE",
        "~5",
        "$",
        "a$",
        r"\$SCRATCH",
    ]
    recipe["model"]["rewards"] = texts
    # neither a pattern nor instructions are a path, whatever they look like
    recipe["data"]["fields"] = {"answer_pattern": "/$SCRATCH"}
    segmenter = {"class_path": "TwoTurn", "init_args": {"instructions": "~/$NOWHERE"}}
    recipe["model"]["rollout"]["segmenter"] = segmenter
    save(recipe)
    options = ["--ckpt_path=~/runs/../last", "--model.policy.chat_template=$HOME"]
    monkeypatch.setattr("turnrl.recipe.invocation.checkpoint_to_resume", lambda path: path)
    invocation = read_invocation("fit", ["recipe.yaml", *options])
    contents = invocation.contents
    assert contents["model"] == {
        **recipe["model"],
        "policy": {"model": "$SCRATCH/models/tiny", "chat_template": "$HOME"},
    }
    filled = {key: map_values(value, expand_variables, key) for key, value in contents.items()}
    policy = {"model": "/scratch/me/models/tiny", "chat_template": "/home/me"}
    assert filled["model"]["policy"] == policy
    (tool,) = filled["model"]["rollout"]["tools"]
    assert tool["init_args"]["index"] == "indexes//scratch/me-wiki"
    assert filled["data"]["train"] == "/home/me/questions.jsonl"
    assert filled["data"]["val"] == "/scratch/me/val.jsonl"
    contents = filled
    assert contents["model"]["rewards"] == texts  # these are no paths
    assert contents["data"]["fields"] == {"answer_pattern": "/$SCRATCH"}
    assert contents["model"]["rollout"]["segmenter"] == segmenter
    assert invocation.contents["ckpt_path"] == "/home/me/runs/../last"


@pytest.mark.parametrize("path", ["$NOWHERE/q.jsonl", "${NOWHERE}", "data/$NOWHERE/q.jsonl"])
def test_a_path_with_a_variable_that_is_not_set_is_refused(path, monkeypatch, recipe, capsys):
    monkeypatch.delenv("NOWHERE", raising=False)
    message = fails(capsys, ["fit", "recipe.yaml", "--data.train", path])
    assert (
        f"data.train is {path!r}, and no variable NOWHERE is set. Run 'export NOWHERE=" in message
    )


# what is given from Python


ARGUMENTS = [
    (Rollout, {"tools": [Echo(), Idle]}, "tools[1] is the class Idle. Pass an instance of"),
    (Rollout, {"tools": Echo()}, "tools is an Echo. Pass a list: tools=[...]."),
    (Rollout, {"segmenter": "ReAct"}, "segmenter is the string 'ReAct'. Pass an instance of"),
    (Rollout, {"temperature": "1"}, "model.rollout.temperature is the string '1'"),
    (MTGRPO, {"policy": "models/tiny"}, "policy is the string 'models/tiny'"),
    (MTGRPO, {"group_size": 8.0}, "model.group_size is 8.0; it must be a whole number"),
    (MTGRPO, {"group_size": None}, "model.group_size is None; it must be a whole number"),
    (Rollout, {"max_turn_tokens": True}, "model.rollout.max_turn_tokens is True"),
    (Policy, {"model": 5}, "model.policy.model is an int. Give a text"),
    (Policy, {"gradient_checkpointing": 1.5}, "model.policy.gradient_checkpointing is 1.5"),
    (QuestionData, {"answers": Number}, "answers is the class Number. Pass an instance of"),
    (Policy, {"lora": {"r": 8}}, "lora is a dict. Pass an instance of Lora."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "wrong", "message"),
    ARGUMENTS,
    ids=range(len(ARGUMENTS)),
)
def test_an_argument_of_the_wrong_type_is_refused_with_what_to_write(
    tiny_model, cls, wrong, message
):
    right = {
        Rollout: lambda: {"segmenter": Letters(), "tools": [Echo()]},
        Policy: lambda: {"model": str(tiny_model)},
        QuestionData: dict,
        ClippedSurrogate: dict,
        Lora: dict,
        Number: dict,
        Recorder: dict,
    }
    right[MTGRPO] = lambda: {
        "policy": Policy(**right[Policy]()),
        "rollout": Rollout(**right[Rollout]()),
        "rewards": [Answered()],
    }
    cls(**right[cls]())
    with pytest.raises(RecipeError) as caught:
        cls(**(right[cls]() | wrong))
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, TypeError)


def test_a_class_in_place_of_a_data_set_is_refused():
    with pytest.raises(DataError, match=r"Numbers.* Give a path, an instance"):
        load_questions(Numbers)


def test_a_dataloader_of_rows_is_refused_before_any_weights_are_loaded(tiny_model, tmp_path):
    loader = torch.utils.data.DataLoader([{"question": "Who?", "answers": "Ada"}] * 4)
    module = make_module(tiny_model)
    with pytest.raises(
        TypeError, match=r"no data module.*fit\(module, QuestionData\(train=rows\)\)"
    ):
        trainer(tmp_path, 1).fit(module, loader, loader)
    assert module.policy.network is None


@pytest.mark.parametrize("value", [None, "1.0", [1.0], torch.ones(2), float("nan"), {}])
def test_an_error_names_a_reward_that_returns_no_number_and_its_value(value):
    class Gives(OutcomeReward):
        def score(self, trajectory):
            return value

    group = trajectories.group(random.Random(0), 0)
    with pytest.raises(PluginError) as caught:
        score_group(group.trajectories, [Gives()])
    message = (
        f"reward Gives on question 'q0' gave {value!r:.80} from score, which is not a finite number"
    )
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith("Return one, such as 0.0 where it has nothing to pay for.")


@pytest.mark.parametrize("value", [1, 0.5, True, torch.tensor(2.0), np.float32(0.25)])
def test_a_reward_may_give_any_number(value):
    class Gives(OutcomeReward):
        def score(self, trajectory):
            return value

    group = trajectories.group(random.Random(0), 0)
    assert score_group(group.trajectories, [Gives()]).outcome.tolist() == [float(value)] * 4


@pytest.mark.parametrize(
    ("returned", "came"), [(None, "None"), ([0.5], "a float"), ("x", "the string")]
)
def test_an_error_tells_an_estimator_without_a_tensor_what_to_return(returned, came):
    class Gives(AdvantageEstimator):
        def __call__(self, group):
            return returned

    group = trajectories.group(random.Random(0), 0, turns=(2, 2))
    message = (
        rf"Gives on a group of 4 with 2 turns gave {came}.* Return a tensor \(4, 2\), or a tuple"
    )
    with pytest.raises(PluginError, match=message):
        assign_credit(group, Gives())


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan"])
def test_an_error_names_the_key_of_a_number_that_is_not_finite(recipe, capsys, text):
    Path("over.yaml").write_text(f"model: {{optimizer: {{init_args: {{lr: {text}}}}}}}")
    message = fails(capsys, ["fit", "recipe.yaml", "over.yaml"])
    assert (
        f"model.optimizer.init_args.lr is {float(text.replace('.', ''))}; it must be fin" in message
    )


def test_only_numbers_that_fit_in_a_float_are_finite():
    numbers = [0, -1.5, 10**300, np.float32(2), np.int64(3), np.float64("1e300")]
    assert all(map(is_finite, numbers))
    others = [math.nan, -math.inf, 10**400, -(10**400), np.float32("inf"), "1", None, 1j, [1.0]]
    assert not any(map(is_finite, others))


# ------------------------------------------------------------------------------ other libraries

GRPO_CONFIG = """
model_init_kwargs disable_dropout cast_lm_head_to_fp32 remove_unused_columns num_generations
num_generations_eval max_completion_length ds3_gather_for_generation shuffle_dataset
generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs
chat_template_kwargs repetition_penalty use_transformers_paged cache_implementation use_vllm
vllm_mode vllm_model_impl vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
vllm_max_model_length vllm_tensor_parallel_size vllm_enable_sleep_mode beta num_iterations epsilon
delta epsilon_high sapo_temperature_neg sapo_temperature_pos importance_sampling_level
reward_weights multi_objective_aggregation scale_rewards loss_type mask_truncated_completions
sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile
max_tool_calling_iterations vllm_importance_sampling_correction vllm_importance_sampling_mode
vllm_importance_sampling_cap off_policy_mask_threshold use_bias_correction_kl log_completions
num_completions_to_print log_unique_prompts log_completions_hub_repo
"""
"""GRPOConfig's own fields in TRL 1."""
TRAINING_ARGUMENTS = """
learning_rate per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps
max_grad_norm num_train_epochs lr_scheduler_type warmup_steps warmup_ratio weight_decay optim
adam_beta1 adam_beta2 adam_epsilon bf16 fp16 gradient_checkpointing logging_steps save_steps
save_strategy save_total_limit eval_steps eval_strategy report_to run_name output_dir seed
data_seed deepspeed fsdp use_liger_kernel push_to_hub hub_model_id resume_from_checkpoint
"""
"""Fields of transformers' TrainingArguments that scripts of GRPO set."""


def test_every_setting_of_trl_has_an_answer():
    answer = r"\. Set .+ instead\.$|\. turnrl has no such setting, because .+\.$"
    for name in [*GRPO_CONFIG.split(), *TRAINING_ARGUMENTS.split()]:
        assert re.search(answer, unknown_key_message(f"model.{name}", ["group_size"], "MTGRPO")), (
            name
        )


def test_every_setting_that_stands_for_another_exists():
    for ours in dict.fromkeys(SYNONYMS.values()):
        keys = re.findall(r"\b(?:model|data|trainer|record)(?:\.[a-z_]+)+", ours)
        assert keys or ours in ("seed_everything", "ckpt_path"), ours
        for key in keys:
            assert not unknown(f"--{key}=null"), key
    assert unknown("--model.rollout.max_turn_token=null")


def unknown(option):
    """Messages about unknown keys in the quickstart with an option."""
    invocation = read_invocation("fit", ["quickstart", option])
    found = filter(None, faults(invocation.contents, invocation.kinds, CLASSES))
    return [fault for fault in found if "unknown key" in fault]


def test_no_setting_has_two_answers_and_every_reason_is_a_clause():
    assert not SYNONYMS.keys() & ABSENT.keys()
    for file in ("synonyms", "absent"):
        text = Path(turnrl.__file__).with_name("recipe") / f"{file}.yaml"
        names = " ".join(yaml.safe_load(text.read_text("utf-8")).values()).split()
        assert len(names) == len(set(names))
    assert not [reason for reason in ABSENT.values() if reason.endswith(".") or len(reason) > 200]


def test_a_setting_that_turnrl_does_not_have_is_answered():
    (message,) = unknown("--disable_dropout=true")
    assert "'disable_dropout'. turnrl has no such setting" in message
    assert "Set model.engine to VLLM instead" in unknown("--use_vllm=true")[0]
