"""Costs of calls."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from typing import final

from turnrl import RecipeError, Trajectory, TurnReward


def check_cost(reward: TurnReward, name: str, value: float) -> float:
    """Return the amount of a cost. Raises a RecipeError if it is negative, since it would pay."""
    if not value >= 0:
        raise RecipeError(
            f"{type(reward).__name__}.{name} is {value}, so it would pay instead of costing. It is "
            "subtracted: leave out the minus."
        )
    return value


@final
class SearchCost(TurnReward):
    """r_k = -weight x n_k in a turn that calls, with n_k the calls attempted up to and including
    turn k; 0 in a turn that does not. In units of reward.

    So every call costs more than the call before it: n turns of one call each cost
    weight x n (n + 1) / 2. Not potential-based: it makes calling less the best policy. v2 of
    the paper (arXiv 2505.11821) gives a search turn -0.1 x searches so far. Here every attempted
    call of any tool counts, even if it failed or could not be read, because otherwise bad calls
    would be cheap. The calls of one turn are charged together, once.

    Args:
        weight: Reward lost for each call so far.
    """

    is_cost = True

    def __init__(self, weight: float = 0.1) -> None:
        self.weight = check_cost(self, "weight", weight)

    def score(self, trajectory: Trajectory, turn: int) -> float:
        calls = [len(taken.reading.calls) for taken in trajectory.turns[: turn + 1]]
        return -self.weight * sum(calls) if calls[-1] else 0.0


@final
class Repetition(TurnReward):
    """r_k = -weight x calls of turn k that repeat a call of the same trajectory, in units of
    reward.

    A call repeats another if it has the same tool and equal arguments. Texts are compared as a
    search compares them: by their words, whatever their case, accents, punctuation and invisible
    characters, or letters of another alphabet that look alike. Signs between two words
    count, as in 1+2 and 1-2. Unreadable calls repeat nothing. Not potential-based: the best policy
    then never asks twice, even where that would help.

    Args:
        weight: Reward lost for each repeated call.
    """

    is_cost = True

    def __init__(self, weight: float = 0.2) -> None:
        self.weight = check_cost(self, "weight", weight)

    def score(self, trajectory: Trajectory, turn: int) -> float:
        before = set(_signatures(trajectory, 0, turn))
        repeated = 0
        for call in _signatures(trajectory, turn, turn + 1):
            repeated += call in before
            before.add(call)
        return -self.weight * repeated if repeated else 0.0


def _signatures(trajectory: Trajectory, first: int, end: int) -> Iterator[str]:
    """A signature of each readable call in a range of turns."""
    for turn in trajectory.turns[first:end]:
        for call in turn.reading.calls:
            if call.error is None:
                parts = [call.name, _normalise(dict(call.arguments))]
                yield json.dumps(parts, sort_keys=True, default=repr)


def _normalise(value: object) -> object:
    if isinstance(value, str):
        return _words(value)
    if isinstance(value, dict):
        return {str(name): _normalise(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_normalise(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


_LOOKALIKES = str.maketrans(
    "авекмнорстухгіѕјԁԛԝһӏαβεηικνορτυχϲ", "abekmhopctyxrisjdqwhlabehiknoptuxc"
)
"""Letters of the Cyrillic and the Greek alphabet that look like Latin ones."""
_UNSEEN = "\u115f\u1160\u17b4\u17b5"  # letters without any ink
_TOKEN = re.compile(r"\d+(?:[.,]\d+)+|[^\W_]+|[-+*/^%=<>&|~()\[\]{}]")


def _words(text: str) -> str:
    """The words of a text, and the signs between two of them."""
    plain = unicodedata.normalize("NFKD", text.casefold()).casefold().translate(_LOOKALIKES)
    kinds = unicodedata.category
    seen = "".join(c for c in plain if kinds(c) not in ("Mn", "Cf") and c not in _UNSEEN)
    words: list[str] = []
    signs = ""  # since the last word
    for token in _TOKEN.findall(seen):
        if not token[0].isalnum():
            signs += token
            continue
        of_names = words and len(words[-1]) > 1 and words[-1].isalpha() and token.isalpha()
        if signs and (words or token[0].isdigit()) and not (of_names and set(signs) <= {*"-/()[]"}):
            words.append(signs)
        words.append(token)
        signs = ""
    return " ".join(words)
