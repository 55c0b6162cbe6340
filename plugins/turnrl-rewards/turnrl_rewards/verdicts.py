"""A judge's verdicts: prompts filled in, replies read, verdicts cached.

The judged text is untrusted. It stands between tags of the prompt. It can contain neither those
tags, nor a chat template's control tokens, nor the form of a verdict that the judge might quote.
The prompt asks to judge it, not to obey it. A policy can still talk the judge round, so look at the
answers that earn rewards.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from turnrl import RecipeError
from turnrl.plugin.errors import RewardError
from turnrl.plugin.text import neutralize
from turnrl_rewards.server import JudgeServer

if TYPE_CHECKING:
    from turnrl.plugin.cache import Cache

_PLACE = re.compile(r"\{(\w+)\}")
_TAG = re.compile(r"</?([A-Za-z]\w*)>")
_CONTROL = re.compile(
    r"<[|｜][^<>]*>|<[^<>]{0,60}[|｜]>|<{1,2}/?[A-Za-z][\w:.▁-]{0,60}>{1,2}"
    r"|\[[|｜][^\[\]]*\]|\[/?\w{0,30}[A-Z]{2}\w{0,30}\]"
)
"""The form of control tokens in judges' chat templates: `<|im_end|>`, `<|turn>`, `<turn|>`,
`<bos>`, `</s>`, `<<SYS>>`, `[|endofturn|]`, `[INST]`, `[TOOL_RESULTS]`, `[gMASK]`. Other words in
such brackets are caught too, and stay readable."""
_BRACES = str.maketrans("{}", "❴❵")

_SCORE = re.compile(r'"score"\s*:\s*([^\s,{}]*)')
_NUMBER = re.compile(r"-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:[eE][-+]?[0-9]{1,3})?")
_MOST_CHARACTERS = 20_000
_REHEARSAL_S = 5.0
"""How long a rehearsal waits for a server that is away."""

Case = Mapping[str, str]
"""Texts for the places of a prompt, by name."""


class Verdicts:
    """A judge's scores, from 0 to 1. Each case is asked about once.

    Args:
        server: The judge's server.
        prompt: The prompt, with its placeholders in braces.
        places: Names of the possible placeholders.
    Raises:
        RecipeError: If the prompt has another placeholder, or lacks the last place, which is for
            the judged text.
    """

    def __init__(self, server: JudgeServer, prompt: str, places: Sequence[str]) -> None:
        placeholders = _PLACE.findall(prompt)
        allowed = ", ".join(f"{{{name}}}" for name in places)
        if odd := [name for name in placeholders if name not in places]:
            raise RecipeError(f"prompt has the placeholder {{{odd[0]}}}, but only {allowed} exist")
        if places[-1] not in placeholders:
            raise RecipeError(f"prompt lacks {{{places[-1]}}}, the text to judge")
        self._server = server
        self._prompt = prompt
        self._places = places
        self._tags = sorted({tag.lower() for tag in _TAG.findall(prompt)})
        self._scores: dict[str, float] = {}
        self._cache: Cache | None = None
        if server.cache is not None:
            from turnrl.plugin.cache import Cache  # loads asyncio, and is seldom needed

            self._cache = Cache(server.cache, RewardError)

    def rehearsal(self) -> Verdicts:
        """The same prompt and judge for `turnrl doctor`: without a cache, and almost without
        patience."""
        patience_s = min(self._server.patience_s, _REHEARSAL_S)
        server = replace(self._server, cache=None, patience_s=patience_s)
        return Verdicts(server, self._prompt, self._places)

    def ask(self, cases: Iterable[Case | None]) -> None:
        """Ask at once about all cases that have no verdict yet.

        Args:
            cases: The cases; None where there is nothing to judge.
        Raises:
            RewardError: If the server stays away, refuses, or gives no verdict.
        """
        filled = (self._fill_prompt(case) for case in cases if case is not None)
        prompts = {self._key(prompt): prompt for prompt in filled}
        wanted = {key: p for key, p in prompts.items() if key not in self._scores}
        if not wanted:
            return
        from turnrl_rewards.asking import ask_all  # slow to import, and seldom needed

        if self._cache is not None:
            self._scores |= self._cache.get(wanted)

        def keep(key: str, score: float) -> None:
            self._scores[key] = score
            if self._cache is not None:  # immediately, so that an outage loses no paid verdict
                self._cache.put({key: score})

        try:
            if left := {key: p for key, p in wanted.items() if key not in self._scores}:
                ask_all(self._server, left, read_verdict, keep)
        finally:
            if self._cache is not None:
                self._cache.close()

    def get(self, case: Case | None) -> float:
        """The verdict on a case; 0 where there is nothing to judge.

        Raises:
            RecipeError: If `ask` has not seen the case.
        """
        if case is None:
            return 0.0
        if (score := self._scores.get(self._key(self._fill_prompt(case)))) is None:
            raise RecipeError(
                "the judge is asked in `prepare`, which has not seen this trajectory. Score with "
                "turnrl.score_group(trajectories, rewards), or prepare first."
            )
        return score

    def _fill_prompt(self, case: Case) -> str:
        # in one pass, so that a place inside a filled-in text stays as it is
        return _PLACE.sub(lambda place: self._neutralize(case[place[1]]), self._prompt)

    def _neutralize(self, text: str) -> str:
        text = text.encode(errors="replace").decode()  # half a surrogate pair cannot be sent
        if len(text) > _MOST_CHARACTERS:
            half = _MOST_CHARACTERS // 2
            text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
        text = neutralize(text, self._tags, ()).translate(_BRACES).replace('"score"', "'score'")
        return _CONTROL.sub(lambda token: f"‹{token[0][1:-1]}›", text)

    def _key(self, prompt: str) -> str:
        request = json.dumps([self._server.url, self._server.body(prompt)], sort_keys=True)
        return hashlib.blake2b(request.encode(), digest_size=16).hexdigest()


def read_verdict(reply: str) -> float | None:
    """The score in a judge's reply, 0 to 1; None if there is none.

    It is the `score` of a JSON object, or a bare yes or no. A judge may think before it, in <think>
    tags. Two different scores are no verdict, because one may be quoted. A score outside 0 to 1 is
    none either.
    """
    text = reply.rpartition("</think>")[2]
    if "<think>" in text:  # cut off in the middle of a thought
        return None
    scores = {*_SCORE.findall(text[-_MOST_CHARACTERS:])}
    if not scores or "{" not in text:
        return {"yes": 1.0, "no": 0.0}.get(text.strip(" \n\t.*`\"'").casefold())
    values = {float(score) if _NUMBER.fullmatch(score) else -1.0 for score in scores}
    value = values.pop()
    return None if values or not 0 <= value <= 1 else value
