"""A server that speaks OpenAI's chat completions, as a recipe describes it."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from turnrl import Message, RecipeError
from turnrl.plugin.errors import check_address, check_at_least


@dataclass(frozen=True)
class ChatServer(ABC):
    """Access to a server, without any secret in it: this is what a recipe holds.

    Args:
        base_url: Address up to `/chat/completions`, such as http://localhost:8000/v1.
        model: The model's name on the server.
        api_key_env: Environment variable with the key, which is sent only to `base_url`; no key is
            sent if this option is null or the variable is not set.
        concurrency: The most requests in flight at once.
        timeout_s: Seconds that one request may take, reply included.
        patience_s: Seconds without any answer after which the run stops; until then requests are
            retried.
        extra: More fields of a request's body, such as `{response_format: {type: json_object}}`.
            Null removes a field (`{max_tokens: null, max_completion_tokens: 512}`).
    Raises:
        RecipeError: If the address is malformed or holds a secret, a key is written out, or a
            number makes no sense.
    """

    base_url: str
    model: str
    api_key_env: str | None = "OPENAI_API_KEY"
    concurrency: int = 16
    timeout_s: float = 60.0
    patience_s: float = 300.0
    extra: dict[str, Any] = field(default_factory=dict)  # not object: jsonargparse reads it

    def __post_init__(self) -> None:
        advice = "Put a key into the environment variable that api_key_env names."
        check_address("base_url", self.base_url, "http://localhost:8000/v1", advice)
        if self.api_key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.api_key_env):
            raise RecipeError(
                "api_key_env must name an environment variable in capitals, such as "
                "OPENAI_API_KEY. Its value is not shown, because it may be the key itself. Recipes "
                "are saved with every run."
            )
        check_at_least(1, "", self, "concurrency", whole=True, optional=False)
        check_at_least(0.001, "", self, "timeout_s")
        check_at_least(0, "", self, "patience_s")

    @property
    def url(self) -> str:
        """The address of requests."""
        return self.base_url.rstrip("/") + "/chat/completions"

    def request(
        self, messages: Sequence[Message] | Sequence[Mapping[str, str]], **settings: object
    ) -> dict[str, object]:
        """The body of a request, without the key."""
        fields = {"model": self.model, "messages": [*messages], **settings, **self.extra}
        return {name: value for name, value in fields.items() if value is not None}


@final
@dataclass(frozen=True)
class EndpointServer(ChatServer):
    """Access to a model that acts; see `ChatServer` for the options."""
