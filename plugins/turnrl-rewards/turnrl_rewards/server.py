"""A judge's server, as a recipe describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from turnrl.plugin.errors import check_at_least
from turnrl_openai import ChatServer


@final
@dataclass(frozen=True)
class JudgeServer(ChatServer):
    """Access to a judge; see `turnrl_openai.ChatServer` for the other options.

    Args:
        cache: File that caches verdicts, so that no text is judged twice. Runs may share it.
        max_tokens: The most tokens in a reply.
    """

    cache: str | None = None
    max_tokens: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, "", self, "max_tokens", whole=True)

    def body(self, prompt: str) -> dict[str, object]:
        """The body of a request, without the key."""
        messages = [{"role": "user", "content": prompt}]
        return self.request(messages, temperature=0, max_tokens=self.max_tokens)
