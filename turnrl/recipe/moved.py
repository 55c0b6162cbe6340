"""Class paths of version 0.8, as recipes and runs have saved them."""

import re
from typing import Any

_HOMES = {
    "turnrl_alarms": "turnrl",
    "turnrl_answers": "turnrl_rewards",
    "turnrl_endpoint": "turnrl_openai",
    "turnrl_qa_rewards": "turnrl_rewards",
    "turnrl_questions": "turnrl",
    "turnrl_react": "turnrl_segmenters",
    "turnrl_turn_rewards": "turnrl_rewards",
    "turnrl_two_turn": "turnrl_segmenters",
}
"""By package of that version, the one that has its classes now."""
_PATH = re.compile(rf"({'|'.join(_HOMES)})((?:\.[a-z]\w*)*)(\.[A-Z]\w*)")


def renamed(value: Any) -> Any:
    """What YAML gives of a recipe, with the class paths of version 0.8 as they are now."""
    if isinstance(value, dict):
        return {key: renamed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item) for item in value]
    if isinstance(value, str) and (match := _PATH.fullmatch(value)):
        return _HOMES[match[1]] + match[3]
    return value
