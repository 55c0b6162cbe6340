"""Finds stop strings in the tokens of a turn as they are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from turnrl.engines import SampledPolicy


class Stops:
    """Finds stop strings in sampled tokens, without decoding a whole turn for each token.

    Args:
        policy: The policy, whose tokenizer decodes the tokens.
        width: How many tokens can be sampled; a model's head may be wider than its vocabulary.
    """

    def __init__(self, policy: SampledPolicy, width: int) -> None:
        self._policy, self._width = policy, width
        self._closers: dict[str, frozenset[int]] = {}

    def closers(self, stop: tuple[str, ...]) -> frozenset[int] | None:
        """Tokens that may complete one of the stop strings, from their texts alone; None for any
        token."""
        ends = {s[-1] for s in stop}
        if not all("!" <= end <= "~" for end in ends):
            return None  # vocabularies write other characters in codes of their own
        for end in ends - self._closers.keys():
            holders = (i for i, p in enumerate(self._pieces) if end in p or p == _byte(ord(end)))
            beyond = range(len(self._pieces), self._width)
            self._closers[end] = frozenset([*holders, *beyond])
        return frozenset().union(*(self._closers[end] for end in ends))

    def has_stop(self, ids: Sequence[int], stop: tuple[str, ...]) -> bool:
        """True if the last tokens of a turn contain a stop string.

        No string is longer in tokens than in bytes, so a tail is enough. The tail begins one token
        earlier, because decoders drop a leading space. It does not begin within a run of byte
        tokens: a character without its first byte would make the whole run unreadable.
        """
        begin = max(0, len(ids) - max(len(s.encode()) for s in stop) - 1)
        while begin and ids[begin] in self._bytes:
            begin -= 1
        text = self._policy.tokenizer.decode(list(ids[begin:]))
        return any(s in text for s in stop)

    @cached_property
    def _pieces(self) -> list[str]:
        tokenizer = self._policy.tokenizer
        pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        return [piece or "" for piece in pieces]

    @cached_property
    def _bytes(self) -> frozenset[int]:
        """Tokens of single bytes, which a vocabulary falls back to for characters that it lacks."""
        names = {_byte(value) for value in range(256)}
        return frozenset(i for i, piece in enumerate(self._pieces) if piece in names)


def _byte(value: int) -> str:
    """The name of a byte's token in a SentencePiece vocabulary."""
    return f"<0x{value:02X}>"
