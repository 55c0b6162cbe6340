"""Somebody else's model as the agent, behind a server of OpenAI's chat completions."""

from turnrl_openai.endpoint import Endpoint as Endpoint
from turnrl_openai.endpoint import EndpointError as EndpointError
from turnrl_openai.server import ChatServer as ChatServer
from turnrl_openai.server import EndpointServer as EndpointServer
