"""Verdicts of a language model: prompts filled in, replies read, verdicts kept.

What is judged is untrusted. It stands between the tags of the prompt, and neither such a tag nor
the control token of a chat template can be written in it; the prompt says that it is to be judged
and not to be followed. A judge can be talked round all the same: look at what it pays for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnrl import RecipeError, RewardError, neutralise
from turnrl_rewards.server import Server

_PLACE = re.compile(r"\{(\w+)\}")
_TAG = re.compile(r"</?([A-Za-z]\w*)>")
_CONTROL = re.compile(r"<[|｜][^<>]*[|｜]>|\[/?INST\]|</?s>|<(?:start|end)_of_turn>")
"""Control tokens of the chat templates that judges have."""

_MOST_CHARACTERS = 20_000
_REHEARSAL_S = 5.0
"""Patience with a server that is away while a run is rehearsed."""

Case = Mapping[str, str]
"""Texts for the places of a prompt, by their names."""


class Verdicts:
    """Scores from 0 to 1 that a judge gave, each asked for once.

    Args:
        server: Whom to ask.
        prompt: What to ask, with the places in braces.
        places: Names of the places that there are.
    Raises:
        RecipeError: If the prompt has another place, or lacks the last one, which is judged.
    """

    def __init__(self, server: Server, prompt: str, places: Sequence[str]) -> None:
        named = _PLACE.findall(prompt)
        known = ", ".join(f"{{{name}}}" for name in places)
        if odd := [name for name in named if name not in places]:
            raise RecipeError(f"prompt has a place {{{odd[0]}}}, and there are {known}")
        if places[-1] not in named:
            raise RecipeError(f"prompt lacks {{{places[-1]}}}, which is to be judged")
        self._server = server
        self._prompt = prompt
        self._places = places
        self._tags = sorted({tag.lower() for tag in _TAG.findall(prompt)})
        self._known: dict[bytes, float] = {}

    def rehearsal(self) -> Verdicts:
        """The same question to the same judge, for `turnrl doctor`: no verdict is kept, and a
        server that is away is not waited for."""
        patience_s = min(self._server.patience_s, _REHEARSAL_S)
        server = replace(self._server, cache=None, patience_s=patience_s)
        return Verdicts(server, self._prompt, self._places)

    def ask(self, cases: Iterable[Case | None]) -> None:
        """Ask about those cases for which there is no verdict yet, all at once.

        Args:
            cases: The cases; None where there is nothing to judge.
        Raises:
            RewardError: If the server is away for too long, refuses, or gives no verdict.
        """
        filled = (self._filled(case) for case in cases if case is not None)
        prompts = {self._key(prompt): prompt for prompt in filled}
        wanted = {key: p for key, p in prompts.items() if key not in self._known}
        if not wanted:
            return
        from turnrl_rewards.asking import ask_all  # slow to import, and seldom needed

        with _kept(self._server.cache) as db:
            if db is not None:
                sought = "SELECT score FROM verdicts WHERE key = ?"
                rows = ((key, db.execute(sought, (key,)).fetchone()) for key in wanted)
                self._known |= {key: float(row[0]) for key, row in rows if row}

            def keep(key: bytes, score: float) -> None:
                self._known[key] = score
                if db is not None:  # at once: what was paid for outlives an outage
                    db.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, score))

            if left := {key: p for key, p in wanted.items() if key not in self._known}:
                ask_all(self._server, left, read_verdict, keep)

    def of(self, case: Case | None) -> float:
        """The verdict of a case; 0 where there is nothing to judge.

        Raises:
            RecipeError: If the case was not asked about.
        """
        if case is None:
            return 0.0
        if (score := self._known.get(self._key(self._filled(case)))) is None:
            raise RecipeError(
                "the judge is asked in `prepare`, which has not seen this trajectory. Score with "
                "turnrl.score_group(trajectories, rewards), or prepare first."
            )
        return score

    def _filled(self, case: Case) -> str:
        # in one pass: a place that is written in what is filled in is not filled in
        return _PLACE.sub(lambda place: self._inert(case[place[1]]), self._prompt)

    def _inert(self, text: str) -> str:
        text = text.encode(errors="replace").decode()  # half a surrogate pair cannot be sent
        if len(text) > _MOST_CHARACTERS:
            half = _MOST_CHARACTERS // 2
            text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
        return neutralise(text, self._tags, sorted(set(_CONTROL.findall(text))))

    def _key(self, prompt: str) -> bytes:
        asked = json.dumps([self._server.url, self._server.body(prompt)], sort_keys=True)
        return hashlib.blake2b(asked.encode(), digest_size=16).digest()


def read_verdict(reply: str) -> float | None:
    """The score in a judge's reply, 0 to 1, or None if it gives none.

    The last JSON object with a `score` counts, for a judge may think or quote before; or a reply
    that is nothing but yes or no. A score outside of 0 to 1 is none.
    """
    said = reply.rpartition("</think>")[2]
    if "<think>" in said:  # cut short in the middle of its thoughts
        return None
    at, last = said.find("{"), None
    while at >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(said, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            last = value.get("score", last)
        at = said.find("{", end)
    if isinstance(last, int | float) and not isinstance(last, bool):
        return float(last) if 0 <= last <= 1 else None
    return {"yes": 1.0, "no": 0.0}.get(said.strip(" \n\t.*`\"'").casefold())


@contextlib.contextmanager
def _kept(path: str | None) -> Iterator[sqlite3.Connection | None]:
    """The file of verdicts, which processes may share."""
    if path is None:
        yield None
        return
    try:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        # written to by the thread that asks, while this one waits for it
        options: Any = {"timeout": 60, "isolation_level": None, "check_same_thread": False}
        with contextlib.closing(sqlite3.connect(path, **options)) as db:
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(
                "CREATE TABLE IF NOT EXISTS verdicts (key BLOB PRIMARY KEY, score REAL NOT NULL) "
                "WITHOUT ROWID"
            )
            yield db
    except (sqlite3.Error, OSError) as error:
        raise RewardError(
            f"the verdicts in {path!r} cannot be used ({error}). Delete the file, free space on "
            "the disk, or set 'cache' to another."
        ) from error
