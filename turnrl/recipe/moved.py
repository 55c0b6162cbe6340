"""Class paths and keys of earlier versions, which recipes and saved runs may still have."""

import copy
import re
from collections.abc import Iterable
from typing import Any

import turnrl
from turnrl.recipe.merging import Contents, Editable, each_value
from turnrl.text import say_once

_PACKAGES = {
    "turnrl_answers": "turnrl_rewards",
    "turnrl_endpoint": "turnrl_openai",
    "turnrl_qa_rewards": "turnrl_rewards",
    "turnrl_questions": "turnrl.data",
    "turnrl_react": "turnrl_segmenters",
    "turnrl_testing": "turnrl.testing",
    "turnrl_turn_rewards": "turnrl_rewards",
    "turnrl_two_turn": "turnrl_segmenters",
}
"""Packages of versions 0.8 and 0.9, each with the package that has its modules now."""
_SERVERS = {"turnrl_openai": "EndpointServer", "turnrl_rewards": "JudgeServer"}
"""Classes that were called Server before 0.18, by their package."""
_KEYS = {
    "model.minibatch_tokens": "model.policy.minibatch_tokens",
    "model.record_per_iteration": "record.per_iteration",
    "model.record_tokens": "record.tokens",
    "model.transcripts_per_iteration": "record.transcripts",
    "model.profile": "plan.profile",
    "model.estimator.critic.coef": "model.objective.value_coef",
    "model.updates_per_iteration": "model.passes_per_iteration",
    "model.steps_per_update": "model.steps_per_pass",
}
"""Keys of earlier versions, each with the key of the setting now."""
SAVED = {"seed_everything", "model", "data", "trainer", "ckpt_path"}
"""Keys of every recipe that a run has saved."""
_EMPTIED = ("record", "plan", "model.objective")
"""Sections that those versions lacked, or that had no value in their recipes."""
_VALUE_COEF = 0.1
"""The default of `critic.coef` in those versions, and of `value_coef` now."""
_OBJECTIVE = {
    **{"clip_low": None, "clip_high": None, "kl_coef": 0.0, "importance_cap": None},
    **{"aggregation": "token", "constant_tokens": 1024, "ratio_level": "token"},
}
"""The settings of an objective that those versions saved as null."""
_PATH = re.compile(rf"({'|'.join([*_PACKAGES, *_SERVERS])})((?:\.[a-z]\w*)*)\.([A-Z]\w*)")


def renamed(value: object) -> Any:
    """The contents of a recipe, with class paths of earlier versions replaced by the present
    ones."""

    def now(item: object, key: str) -> object:
        match = _PATH.fullmatch(item) if isinstance(item, str) else None
        return _now(*match.groups()) if match else item

    return each_value(value, now)


def _now(package: str, modules: str, name: str) -> str:
    home = _PACKAGES.get(package, package)
    if name == "Server" and home in _SERVERS:
        return f"{home}.{_SERVERS[home]}"
    if package not in _PACKAGES:
        return f"{package}{modules}.{name}"
    if name in dir(turnrl):  # a public name
        return f"turnrl.{name}"
    if not home.startswith("turnrl."):  # a plugin, which names its classes at its top
        return f"{home}.{name}"
    if package == "turnrl_questions" and not modules:
        modules = ".known"
    return f"{home}{modules}.{name}"


def up_to_date(contents: Contents, before: Contents | None = None, prints: bool = False) -> Any:
    """A recipe, or options, of any version, with the keys and class paths of this version.

    Args:
        contents: The recipe or options, as YAML gives them.
        before: The recipes and options that these override. They may name the module's class.
        prints: Print a line for each old key, once, unless a run has saved the contents.
    """
    new = renamed(contents)
    if not _trains_by_mtgrpo(new, before or {}):
        return new
    if saved := {*new} >= SAVED:
        _move_value_coef(new)
    for old, key in _move(new, _KEYS.items()):
        if prints and not saved:
            say_once(f"turnrl: {old} is now {key}. The old key still works.")
    return new


def as_before(contents: Contents) -> Editable:
    """The contents of a recipe with the earliest keys, so that their digest stays the same when
    keys move."""
    old: Editable = copy.deepcopy({**contents})
    if _trains_by_mtgrpo(old, {}):
        _move(old, [(new, old) for old, new in _KEYS.items()], make=False)
    for path in _EMPTIED:
        name = path.rpartition(".")[2]
        owner = _owner(old, path)
        if owner is not None and owner.get(name) == {}:
            del owner[name]
    return old


def _trains_by_mtgrpo(*recipes: Contents) -> bool:
    """True unless a recipe names a module of the user's own, which may have such keys itself."""
    models = (recipe["model"] for recipe in recipes if isinstance(recipe.get("model"), dict | str))
    paths = (model if isinstance(model, str) else model.get("class_path") for model in models)
    path = next(filter(None, paths), "MTGRPO")
    return str(path).rpartition(".")[2] == "MTGRPO"


def _owner(contents: Editable, path: str, make: bool = False) -> Editable | None:
    """The mapping that has the last key of a path, or would have it; None if there is no such
    mapping.

    Args:
        contents: The contents of a recipe.
        path: Keys, without `init_args`.
        make: Add mappings that are missing on the way.
    """
    here: object = contents
    for key in path.split(".")[:-1]:
        if not isinstance(here, dict):
            break
        if make and here.get(key) is None:
            here[key] = {}
        here = here.get(key)
        if isinstance(here, dict) and ("init_args" in here or (make and "class_path" in here)):
            here = here.setdefault("init_args", {})
    return here if isinstance(here, dict) else None


def _move(
    contents: Editable, keys: Iterable[tuple[str, str]], make: bool = True
) -> list[tuple[str, str]]:
    """Move settings to other keys, unless these have a value already.

    Args:
        contents: The contents of a recipe, which are changed.
        keys: Pairs of an old and a new key.
        make: Add sections that are missing.
    Returns:
        The pairs whose old key was there.
    """
    moved = []
    for key, new_key in keys:
        name, new_name = (path.rpartition(".")[2] for path in (key, new_key))
        owner = _owner(contents, key)
        if owner is None or name not in owner:
            continue
        if (new_owner := _owner(contents, new_key, make)) is not None:
            new_owner.setdefault(new_name, owner.pop(name))
            moved.append((key, new_key))
    return moved


def _move_value_coef(saved: Editable) -> None:
    """Prepare a saved recipe for the move of `critic.coef`. The default weight is written where a
    run of this version saves it; any other weight gets an objective to move to."""
    critic = _owner(saved, "model.estimator.critic.coef") or {}
    model = _owner(saved, "model.objective") or {}
    if critic.get("coef") == _VALUE_COEF:
        del critic["coef"]
    if "coef" in critic:
        model["objective"] = model.get("objective") or {**_OBJECTIVE}
        return
    objective = model.get("objective")
    if isinstance(objective, dict) and "class_path" not in objective:
        objective.setdefault("value_coef", _VALUE_COEF)
