"""Keys of versions 0.8 and 0.9: read as the keys that have taken their places."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import turnrl
from commands import fails, save
from turnrl.cli import main
from turnrl.commands.sweep.matrix import read_cells
from turnrl.recipe.invocation import read_invocation
from turnrl.runs.load import differences, open_runs
from turnrl.text import say_once

CRITIC = {"class_path": "TurnCritic", "init_args": {"critic": {"lr": 0.2}}}
OLD = {
    "minibatch_tokens": 512,
    "record_per_iteration": None,
    "record_tokens": True,
    "transcripts_per_iteration": 2,
    "profile": None,
}
PAIRS = {
    "model.minibatch_tokens": "model.policy.minibatch_tokens",
    "model.record_per_iteration": "record.per_iteration",
    "model.record_tokens": "record.tokens",
    "model.transcripts_per_iteration": "record.transcripts",
    "model.profile": "plan.profile",
    "model.estimator.critic.coef": "model.objective.value_coef",
}


@pytest.fixture(autouse=True)
def nothing_printed_yet():
    say_once.cache_clear()


@pytest.fixture
def both(recipe):
    """One recipe in the old keys and in the new ones."""
    old, new = copy.deepcopy(recipe), copy.deepcopy(recipe)
    old["model"] |= OLD | {"estimator": copy.deepcopy(CRITIC)}
    old["model"]["estimator"]["init_args"]["critic"]["coef"] = 0.3
    new["model"] |= {"estimator": CRITIC, "objective": {"value_coef": 0.3}}
    new["model"]["policy"]["minibatch_tokens"] = 512
    new |= {
        "record": {"per_iteration": None, "tokens": True, "transcripts": 2},
        "plan": {"profile": None},
    }
    save(old, "old.yaml")
    save(new, "new.yaml")
    return old, new


def read(*words):
    return read_invocation("fit", words).contents


def below_init_args(contents):
    return {**contents, "model": {"class_path": "turnrl.MTGRPO", "init_args": contents["model"]}}


def test_old_keys_are_read_as_new_keys_with_one_warning_each(both, capsys):
    assert read("old.yaml") | {"trainer": 0} == read("new.yaml") | {"trainer": 0}
    read("old.yaml")  # nothing is printed twice
    assert capsys.readouterr().err.splitlines() == [
        f"turnrl: {old} is now {new}. The old key still works." for old, new in PAIRS.items()
    ]


def test_old_keys_below_init_args_and_as_options_are_read(both, capsys):
    old, new = both
    save(below_init_args(old), "old.yaml")
    save(below_init_args(new), "wanted.yaml")
    assert read("old.yaml")["model"] == read("wanted.yaml")["model"]
    del old["model"]["estimator"]["init_args"]["critic"]["coef"]
    save({**old, "model": {k: v for k, v in old["model"].items() if k not in OLD}}, "bare.yaml")
    options = [f"--model.{key}={str(value).replace('None', 'null')}" for key, value in OLD.items()]
    contents = read("bare.yaml", *options, "--model.estimator.critic.coef=0.3")
    assert contents["model"]["estimator"] == CRITIC
    assert contents["model"]["policy"]["minibatch_tokens"] == "512"
    assert contents["model"]["objective"] == {"value_coef": "0.3"}
    assert contents["record"] == {"per_iteration": None, "tokens": True, "transcripts": "2"}
    assert contents["plan"] == {"profile": None}
    assert read("bare.yaml", "--model.init_args.record_tokens", "true")["record"] == {
        "tokens": True
    }


def test_a_new_key_overrides_its_old_key_and_an_option_overrides_a_recipe(recipe):
    recipe["model"]["record_per_iteration"] = 3
    recipe["record"] = {"per_iteration": 5}
    save(recipe)
    assert read("recipe.yaml")["record"] == {"per_iteration": 5}
    assert read("recipe.yaml", "--model.record_per_iteration=7")["record"] == {"per_iteration": "7"}


def test_your_own_module_may_have_keys_of_these_names(recipe):
    recipe["model"] = {"class_path": "mine.Module", "init_args": {"profile": "x"}}
    save(recipe)
    contents = read("recipe.yaml", "--model.minibatch_tokens", "3")
    assert contents["model"]["init_args"] == {"profile": "x", "minibatch_tokens": "3"}
    assert (contents["record"], contents["plan"]) == ({}, {})


def test_the_sections_become_callbacks(both):
    for name in ("old.yaml", "new.yaml"):
        built = turnrl.build([name])
        (recorder,) = (c for c in built.trainer.callbacks if isinstance(c, turnrl.Recorder))
        (plan,) = (c for c in built.trainer.callbacks if isinstance(c, turnrl.Plan))
        assert (recorder.per_iteration, recorder.tokens, recorder.transcripts) == (None, True, 2)
        assert (plan.profile, built.start.profile, built.start.recorded) == (None, None, None)
        assert built.module.policy.settings.minibatch_tokens == built.module.policy.budget == 512
        assert built.module.objective.value_coef == 0.3
        assert built.module.estimator.critic == turnrl.Critic(lr=0.2)


def test_old_and_new_keys_have_the_same_digest(both):
    ((old,), (new,)) = (read_cells([name], "0", [])[1] for name in ("old.yaml", "new.yaml"))
    assert old.digest == new.digest
    (other,) = read_cells(["new.yaml", "--record.transcripts", "3"], "0", [])[1]
    assert other.digest != new.digest


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"record": {"per_iterations": 3}}, "'record.per_iterations'. Did you mean per_iteration?"),
        ({"plan": {"profil": "24GB"}}, "'plan.profil'. Did you mean profile?"),
        ({"recrod": {}}, "'recrod'. Did you mean record?"),
        ({"record": {"tokens": "maybe"}}, "record.tokens is 'maybe'; it must be true or false."),
    ],
)
def test_a_mistake_in_a_new_section_is_reported_before_torch_is_loaded(
    recipe, capsys, settings, message
):
    save(recipe | settings)
    with pytest.raises(turnrl.RecipeError) as caught:
        read_invocation("fit", ["recipe.yaml"]).check()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"record": {"per_iteration": -1}}, "record.per_iteration is -1; it must be at least 0"),
        ({"plan": {"profile": "24"}}, "plan.profile is '24'; give 'auto', null, or a size"),
        ({"record": "Recorder"}, "record names 'Recorder', but there is no class to choose."),
    ],
)
def test_an_impossible_value_in_a_new_section_is_an_error(recipe, capsys, settings, message):
    save(recipe | settings)
    assert message in fails(capsys, ["fit", "recipe.yaml"])


def test_a_second_recorder_among_the_callbacks_is_refused(recipe, capsys):
    recipe["trainer"]["callbacks"] = ["turnrl.Recorder"]
    save(recipe)
    assert "trainer.callbacks has a Recorder" in fails(capsys, ["fit", "recipe.yaml"])


def as_version_0_9(contents):
    """What that version saves of a run."""
    old = copy.deepcopy(contents)
    record, plan, model = old.pop("record"), old.pop("plan"), old["model"]
    model["minibatch_tokens"] = model["policy"].pop("minibatch_tokens")
    model |= {
        "record_per_iteration": record["per_iteration"],
        "record_tokens": record["tokens"],
        "transcripts_per_iteration": record["transcripts"],
        "profile": plan["profile"],
    }
    critic = model["estimator"]["init_args"]["critic"]
    critic["coef"] = (model["objective"] or {"value_coef": 0.1}).pop("value_coef")
    if not any((model["objective"] or {}).get(name) for name in ("clip_low", "kl_coef")):
        model["objective"] = None
    return old


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [None, {"clip_low": 0.1}, {"value_coef": 0.3}],
    ids=["default", "own objective", "own weight"],
)
def test_a_run_with_old_keys_can_be_resumed_evaluated_played_and_compared(
    recipe, capsys, objective
):
    recipe["model"] |= {"estimator": CRITIC, "objective": objective, "steps_per_pass": 1}
    recipe["record"] = {"tokens": True}
    save(recipe)
    assert main(["fit", "recipe.yaml", "--trainer.max_epochs=1"]) == 0
    run, other = Path("runs/recipe/version_0"), Path("runs/recipe/version_1")
    shutil.copytree(run, other)
    old = as_version_0_9(yaml.safe_load((run / "config.yaml").read_text()))
    assert old["model"]["record_tokens"] is True
    (run / "config.yaml").write_text(yaml.safe_dump(old))
    for name in ("last", "best"):
        file = run / "checkpoints" / f"{name}.ckpt"
        kept = torch.load(file, weights_only=True)
        torch.save(kept | {"recipe": yaml.safe_dump(old)}, file)
    assert differences(open_runs([run, other])) == {}
    capsys.readouterr()
    last = ["--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    assert main(["fit", "recipe.yaml", *last]) == 0
    errors = capsys.readouterr().err
    assert "model." not in errors
    assert "record" not in errors
    assert main(["fit", str(run / "config.yaml"), "--trainer.max_epochs=2", *last]) == 0
    assert main(["eval", str(run)]) == 0
    assert main(["play", str(run), "Number 7?"]) == 0
    assert main(["compare", str(run), str(other)]) == 0
    assert "The old key" not in capsys.readouterr().err
    bare = turnrl.load(run / "checkpoints" / "last.ckpt")
    assert bare.estimator.critic == turnrl.Critic(lr=0.2)
