"""The server that a judge runs on, as a recipe describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from turnrl import at_least
from turnrl_openai import ChatServer


@final
@dataclass(frozen=True)
class Server(ChatServer):
    """Access to a server that speaks OpenAI's chat completions, without any secret in it: this is
    what a recipe holds.

    Args:
        base_url: Address up to `/chat/completions`, such as http://localhost:8000/v1.
        model: The judge, as the server calls it.
        api_key_env: Name of the environment variable that holds the key, which is sent to
            `base_url` and nowhere else; no key is sent if it is null or not set.
        cache: File in which verdicts are kept, shared by runs, so that nothing is asked twice.
        concurrency: Requests under way at once.
        timeout_s: Seconds that one request may take, its answer included.
        patience_s: Seconds without any answer after which the run stops; requests are tried again
            until then.
        max_tokens: The most tokens of a reply.
        extra: More fields of a request's body, such as `{response_format: {type: json_object}}`;
            one that is null leaves ours out (`{max_tokens: null, max_completion_tokens: 512}`).
    Raises:
        RecipeError: If the address holds a secret or is none, a key is written out, or a number
            makes no sense.
    """

    cache: str | None = None
    max_tokens: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, "", self, "max_tokens", whole=True)

    def body(self, prompt: str) -> dict[str, Any]:
        """Body of the request for a prompt; the key is not in it."""
        messages = [{"role": "user", "content": prompt}]
        return self.request(messages, temperature=0, max_tokens=self.max_tokens)
