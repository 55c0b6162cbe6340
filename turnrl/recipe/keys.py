"""Names of settings in other libraries, and the message about an unknown key."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from turnrl.plugin.errors import suggest_name


def _by_name(file: str) -> dict[str, str]:
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    return {name: key for key, names in yaml.safe_load(text).items() for name in names.split()}


SYNONYMS = _by_name("synonyms.yaml")
"""Settings of TRL, verl, Search-R1 and verifiers, each with the setting of turnrl."""
ABSENT = _by_name("absent.yaml")
"""Settings of TRL that turnrl does not have, each with the reason."""


def suggest_key(name: str) -> str:
    """` Set model.group_size instead.` for a setting of another library, or the reason why turnrl
    does not have it; empty for a name that no other library has.

    Args:
        name: The setting.
    """
    if name in SYNONYMS:
        return f" Set {SYNONYMS[name]} instead."
    return f" turnrl has no such setting, because {ABSENT[name]}." if name in ABSENT else ""


def suggest_key_below(key: str, value: object) -> str:
    """The answer of `suggest_key` to a key, or to the first key below it that has one."""
    if advice := suggest_key(key):
        return advice
    for name, item in value.items() if isinstance(value, Mapping) else ():
        if advice := suggest_key_below(str(name), item):
            return advice.replace(" instead.", f" instead of {name}.")
    return ""


def unknown_key_message(key: str, known: Iterable[str], owner: str, component: bool = False) -> str:
    """Write the message about a key that a class does not have.

    Args:
        key: The key's full path in the recipe.
        known: The keys that the class has.
        owner: The name of the class.
        component: True if the recipe named the class. The names of other libraries are looked up
            only for the recipe's own sections.
    """
    name = key.rpartition(".")[2]
    known = list(known)
    keys = f"{owner} has the keys {', '.join(known) or 'none'}."
    if not component and (advice := suggest_key(name)):
        return f"unknown key {key!r}.{advice}"
    colon = " In YAML a space follows the colon." if ":" in name else ""
    return f"unknown key {key!r}.{colon}{suggest_name(name, known) or f' {keys}'}"
