"""The checkpoint of a run that `turnrl eval` scores. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import replace

from turnrl.recipe.folders import LATEST
from turnrl.recipe.given import Given


def prepare(given: Given) -> Given:
    """Say which checkpoint of a run is scored, where nothing that was given says it: its best, or
    else its last. A server that acts in place of its policy needs none.

    Args:
        given: Recipes and options, put together.
    Raises:
        CheckpointError: If the run has no checkpoint.
    """
    if given.agent is None:
        return given
    checkpoint = given.contents.get("ckpt_path", "")
    if checkpoint == "" and given.contents.get("endpoint"):
        checkpoint = None
    elif checkpoint in ("", *LATEST):
        checkpoint = str(given.agent.weights(checkpoint or None))
    return replace(given, contents={**given.contents, "ckpt_path": checkpoint})
