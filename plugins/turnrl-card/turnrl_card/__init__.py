"""The trained policy, for use without turnrl: its weights, its tokenizer and a model card.

card      the card, and the name of the model that the policy was trained from
ending    the export at the end of a run
"""

from collections.abc import Iterable
from typing import Any

from turnrl import hookimpl
from turnrl_card.card import export as export


@hookimpl
def turnrl_callbacks() -> Iterable[Any]:
    """The export at the end of a run."""
    from turnrl_card.ending import ExportsPolicy

    return [ExportsPolicy]
