"""Somebody else's model as the agent, behind a server that speaks OpenAI's chat completions."""

from turnrl_endpoint.endpoint import Endpoint as Endpoint
from turnrl_endpoint.endpoint import EndpointError as EndpointError
from turnrl_endpoint.server import ChatServer as ChatServer
from turnrl_endpoint.server import Server as Server
