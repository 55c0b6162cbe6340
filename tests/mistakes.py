"""Mistakes of users in recipes and commands, and what their messages have to contain."""

from __future__ import annotations

from typing import Any, NamedTuple


class Mistake(NamedTuple):
    """A mistake, and three parts of its message.

    Args:
        name: What the user got wrong.
        given: Settings that go into a working recipe, by their paths; or the words after `turnrl`.
        key: The setting, or the kind of thing, that is wrong.
        value: What it was given.
        advice: The next step, with which the message ends.
    """

    name: str
    given: dict[Any, Any] | str
    key: str
    value: str
    advice: str


def component(name, **settings):
    """A class with settings, as a recipe writes it."""
    return {"class_path": name, "init_args": settings}


SPARE = {"class_path": "ExactMatch", "weight": 2}

MISTAKES = [
    Mistake("a typo at the top", {"modle": {}}, "unknown key", "modle", "Did you mean model"),
    Mistake("a section's setting at the top", {"group_size": 4}, "unknown key", "group_size",
        "Did you mean model.group_size"),
    Mistake("a typo in policy", {"model.policy.modle": "x"}, "unknown key", "model.policy.modle",
        "Did you mean model"),
    Mistake("a typo in a reward", {"model.rewards": [component("ExactMatch", wait=1)]},
        "unknown key", "model.rewards[0].wait", "Did you mean weight"),
    Mistake("no space after a colon", {"model.policy.lora": {"rank:4": None}}, "unknown key",
        "model.policy.lora.rank:4", "a space follows the colon"),
    Mistake("TRL's name for the size of a group", {"model.num_generations": 8}, "unknown key",
        "model.num_generations", "Set model.group_size instead."),
    Mistake("verl's whole path", "fit recipe.yaml --actor_rollout_ref.rollout.n 5", "unknown key",
        "actor_rollout_ref", "Set model.group_size instead of n."),
    Mistake("an optimiser's other name", {"model.optimizer.init_args.learning_rate": 1},
        "unknown key", "model.optimizer.learning_rate", "AdamW has the keys lr, betas,"),
    Mistake("a fraction for a count", {"model.group_size": 4.5}, "model.group_size", "4.5",
        "must be a whole number."),
    Mistake("a number for a switch", {"trainer.detect_anomaly": 3}, "trainer.detect_anomaly", "3",
        "must be true or false."),
    Mistake("no choice", {"model.policy.quantization": "int3"}, "model.policy.quantization",
        "'int3'", "must be one of 'nf4', 'none'"),
    Mistake("no recipe", "fit", "turnrl fit", "needs a recipe", "RECIPE.yaml [--key value ...]"),
    Mistake("a recipe's typo", "fit recipes.yaml", "no recipe at", "'recipes.yaml'",
        "Did you mean recipe.yaml"),
    Mistake("no dashes", "fit recipe.yaml trainer.max_epochs=2", "unknown argument",
        "'trainer.max_epochs=2'", "Did you mean --trainer.max_epochs=2"),
    Mistake("a slash for a dot", "fit recipe.yaml --model/group_size 8", "unknown argument",
        "'--model/group_size'", "Did you mean --model.group_size"),
    Mistake("a recipe after options", "fit --model.group_size 8 recipe.yaml", "unknown argument",
        "'recipe.yaml'", "Recipes come first"),
    Mistake("no value before an option",
        "fit recipe.yaml --model.group_size --trainer.max_epochs 2", "--model.group_size",
        "no value", "Give it as --model.group_size VALUE"),
    Mistake("a setting of a list", "fit recipe.yaml --model.rewards.init_args.weight 3",
        "model.rewards", "'weight': '3'", "Give the whole list"),
    Mistake("a checkpoint that is not there", "fit recipe.yaml --ckpt_path none.ckpt", "checkpoint",
        "'none.ckpt'", "Runs keep theirs in their checkpoints/."),
    Mistake("no run to go on from", "fit recipe.yaml --ckpt_path last", "ckpt_path", "'last'",
        "Give the path of one, or of a run's folder."),
    Mistake("a split of no kind", "eval recipe.yaml --split tset", "split", "'tset'",
        "must be one of 'train', 'val', 'test'. Did you mean test"),
    Mistake("a command's typo", "fitt recipe.yaml", "no command", "'fitt'", "Did you mean fit?"),
    Mistake("a typo in an added reward",
        "fit recipe.yaml --model.rewards+ ExactMatch --model.rewards.wait 1", "unknown key",
        "model.rewards[2].wait", "Did you mean weight"),
    Mistake("a typo in a class by its path",
        "fit recipe.yaml --model.estimator turnrl.TurnLevel --model.estimator.gama 1",
        "unknown key", "model.estimator.gama", "Did you mean gamma"),
    Mistake("a typo in a scheduler",
        "fit recipe.yaml --model.scheduler CosineAnnealingLR --model.scheduler.tmax 1",
        "unknown key", "model.scheduler.tmax", "Did you mean T_max"),
    Mistake("a typo in a class beside the recipe",
        "fit recipe.yaml --model.engine mine.Mine --model.engine.colour x", "unknown key",
        "model.engine.colour", "Did you mean color"),
    Mistake("a file that is not a checkpoint", "fit recipe.yaml --ckpt_path recipe.yaml",
        "'recipe.yaml'", "is not a checkpoint", "Give a last.ckpt of a run."),
    Mistake("a word in a list of whole numbers", "fit recipe.yaml --trainer.devices [0,x]",
        "trainer.devices[1]", "'x'", "must be a whole number."),
    Mistake("a second seed", {"model.seed": 3}, "model.seed", "3", "set seed_everything"),
    Mistake("nothing for a count", {"model.group_size": None}, "model.group_size", "null",
        "must be a whole number."),
    Mistake("nothing for a list", {"model.rollout.tools": None}, "model.rollout.tools", "null",
        "must be a list, such as [NAME]."),
    Mistake("one number for two", {"model.optimizer.init_args.betas": [0.9]},
        "model.optimizer.betas", "[0.9]", "must be a list of 2."),
    Mistake("a switch for a section", {"model.policy.lora": True}, "model.policy.lora", "True",
        "must be a mapping with keys of r,"),
    Mistake("no class of a component's part",
        {"model.rollout.tools": [component("WikiSearch", index=component("Elastik", url="x"))]},
        "model.rollout.tools[0].index", "'Elastik'", "Did you mean Elasticsearch"),
    Mistake("a seed that is too small", {"seed_everything": -1}, "seed_everything", "-1",
        "must be a number from 0 to 4294967295"),
    Mistake("a list for the model", {"model": [1]}, "model", "[1]", "Name it: {class_path: NAME"),
    Mistake("a clip below zero", {"model.objective": {"clip_low": -3}}, "clip_low", "-3.0",
        "Set clip_low between 0 and 1"),
    Mistake("a group of one", {"model.group_size": 1}, "group_size", "1", "Raise it (16 is usual)"),
    Mistake("more steps than trajectories", {"model.steps_per_pass": 17}, "steps_per_pass", "17",
        "Lower it."),
    Mistake("gradients gathered twice", {"trainer.accumulate_grad_batches": 2},
        "trainer.accumulate_grad_batches", "2", "Leave it out"),
    Mistake("no device", {"trainer.devices": 0}, "under trainer", "devices=0",
        "'accelerator: auto' takes what this machine has"),
    Mistake("a reward twice", {"model.rewards": ["ExactMatch", "ExactMatch"]}, "model.rewards",
        "'outcome/exact_match'", "Leave one out"),
    Mistake("no rewards", {"model.rewards": []}, "rewards", "empty",
        "Add one, for example ExactMatch."),
    Mistake("a class of no package", {"model": {"class_path": "nowhere.Module"}}, "model",
        "'nowhere.Module'", "No module named 'nowhere')."),
    Mistake("a module's typo", {"model.rollout.tools": ["worlds.Ecko"]}, "model.rollout.tools[0]",
        "'worlds.Ecko'", "Did you mean Echo?"),
    Mistake("a reward as a tool", {"model.rollout.tools": ["ExactMatch"]}, "model.rollout.tools[0]",
        "'ExactMatch'", "which is no installed Toolset. Installed: "),
    Mistake("a class that extends nothing", {"model.rollout.tools": ["worlds.NotATool"]},
        "tools[0]", "'worlds.NotATool'",
        "which does not extend Toolset. Installed: "),
    Mistake("a player beside a segmenter",
        {"model.rollout.player": "players.plain_agent.PlainAgent"}, "segmenter", "it has both",
        "write 'segmenter: null' beside it in the recipe, or add --model.rollout.segmenter null."),
    Mistake("a class with a method missing", {"model.rollout.tools": ["worlds.Idle"]}, "tools[0]",
        "'worlds.Idle'", "which lacks run. Define what is missing."),
    Mistake("a number for a component", {"model.rollout.tools": ["worlds.Echo", 3]},
        "model.rollout.tools[1]", "3",
        " or the path of a function, such as my_module.my_function."),
    Mistake("a truth value for a word", {"data.train_split": True}, "data.train_split", "True",
        "In YAML on, off, yes and no are true and false: put them in quotes, such as 'on'."),
    Mistake("a mapping for a list", {"model.rewards": {"ExactMatch": {"weight": 2}}},
        "model.rewards", "'ExactMatch'", "must be a list, such as [NAME]."),
    Mistake("settings beside the class", {"model.rewards": [SPARE]}, "model.rewards[0]", "'weight'",
        "{class_path: ExactMatch, init_args: {weight: 2}}"),
    Mistake("settings under the class's name", {"model.rewards": [{"ExactMatch": {"weight": 2}}]},
        "model.rewards[0]", "'ExactMatch'", "Name it: {class_path: NAME, init_args: {...}}"),
    Mistake("a list of settings", {"model.rewards": [component("ExactMatch") | {"init_args": [1]}]},
        "model.rewards[0].init_args", "[1]", "must be a mapping."),
    Mistake("a class for a section", {"model.policy.class_path": "X"}, "model.policy", "'X'",
        "Policy has the keys model,"),
    Mistake("a tool without its settings", {"model.rollout.tools": ["WikiSearch"]},
        "model.rollout.tools[0].index", "missing", "Set index."),
    Mistake("no model", {"model.policy.model": "./none"}, "no model folder", "'./none'",
        "Set model.policy.model to a folder"),
    Mistake("no chat template", {"model.policy.chat_template": "qwen33"}, "policy.chat_template",
        "'qwen33'", "Did you mean qwen3"),
    Mistake("no file of data", {"data.train": "none.jsonl"}, "data.train", "'none.jsonl'",
        "Check its name."),
    Mistake("no data set", {"data.train": "trivia"}, "data.train", "'trivia'",
        "Did you mean triviaqa"),
    Mistake("a setting of nothing named", "fit recipe.yaml --model.engine.slots 32", "model.engine",
        "{'slots': '32'}", "or by an option --model.engine NAME before its settings"),
    Mistake("help for no class", "fit --model.rewards.help ExactMach", "Expected", "ExactMach",
        "path"),
]  # fmt: skip
