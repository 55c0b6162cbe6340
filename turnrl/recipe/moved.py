"""Class paths of versions 0.8 and 0.9, as recipes and runs have saved them."""

import re
from typing import Any

import turnrl

_PACKAGES = {
    "turnrl_alarms": "turnrl.run.alarms",
    "turnrl_answers": "turnrl_rewards",
    "turnrl_card": "turnrl.run.card",
    "turnrl_checkpoints": "turnrl.run.kept",
    "turnrl_console": "turnrl.run.console",
    "turnrl_endpoint": "turnrl_openai",
    "turnrl_qa_rewards": "turnrl_rewards",
    "turnrl_questions": "turnrl.data",
    "turnrl_react": "turnrl_segmenters",
    "turnrl_record": "turnrl.run",
    "turnrl_report": "turnrl.commands.report",
    "turnrl_testing": "turnrl.testing",
    "turnrl_turn_rewards": "turnrl_rewards",
    "turnrl_two_turn": "turnrl_segmenters",
}
"""Packages of those versions, and what has their modules now."""
_PATH = re.compile(rf"({'|'.join(_PACKAGES)})((?:\.[a-z]\w*)*)\.([A-Z]\w*)")


def renamed(value: Any) -> Any:
    """The contents of a recipe, with the class paths of those versions as they are now."""
    if isinstance(value, dict):
        return {key: renamed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item) for item in value]
    if isinstance(value, str) and (match := _PATH.fullmatch(value)):
        return _now(*match.groups())
    return value


def _now(package: str, modules: str, name: str) -> str:
    home = _PACKAGES[package]
    if name in dir(turnrl):  # a public name
        return f"turnrl.{name}"
    if not home.startswith("turnrl."):  # a plugin, which names its classes at its top
        return f"{home}.{name}"
    if package == "turnrl_questions" and not modules:
        modules = ".known"
    return f"{home}{modules}.{name}"
