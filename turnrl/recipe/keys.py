"""Names of the settings in other libraries, and the message about an unknown key."""

from collections.abc import Iterable
from pathlib import Path

import yaml

from turnrl.errors import did_you_mean

_OTHERS = yaml.safe_load(Path(__file__).with_name("synonyms.yaml").read_text(encoding="utf-8"))
SYNONYMS = {other: ours for ours, others in _OTHERS.items() for other in others.split()}
"""Settings of TRL, verl, Search-R1 and verifiers, and what to set here."""
_MOVED = {"minibatch_tokens": "model.policy.minibatch_tokens", "trunk": "trains_policy"}
"""Keys of components in earlier recipes, and what to set in their place."""


def unknown_key(key: str, known: Iterable[str], owner: str, component: bool = False) -> str:
    """Write the message about a key that a class does not have.

    Args:
        key: The key with those above it.
        known: The keys that the class has.
        owner: Name of the class.
        component: True if the recipe named the class. The names of other libraries are looked up
            only for the recipe's own sections.
    """
    name = key.rpartition(".")[2]
    known = list(known)
    keys = f"{owner} has the keys {', '.join(known) or 'none'}."
    if component and name in _MOVED:
        return f"unknown key {key!r}. Set {_MOVED[name]} instead. {keys}"
    if not component and name in SYNONYMS:
        return f"unknown key {key!r}. Set {SYNONYMS[name]} instead."
    colon = " In YAML a space follows the colon." if ":" in name else ""
    return f"unknown key {key!r}.{colon}{did_you_mean(name, known) or f' {keys}'}"
