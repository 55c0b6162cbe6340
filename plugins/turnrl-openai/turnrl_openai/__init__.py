"""Somebody else's model as the agent, behind a server of OpenAI's chat completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnrl.plugin.hooks import make_lazy

if TYPE_CHECKING:
    from turnrl_openai.endpoint import Endpoint as Endpoint
    from turnrl_openai.endpoint import EndpointError as EndpointError
    from turnrl_openai.server import ChatServer as ChatServer
    from turnrl_openai.server import EndpointServer as EndpointServer

__getattr__, __all__ = make_lazy(__name__, __file__)
