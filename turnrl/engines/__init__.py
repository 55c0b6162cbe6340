"""For those who write an engine: its contract, and the values that it gets and returns."""

from turnrl.types.engine import (
    Attend,
    Completion,
    Engine,
    EngineSettings,
    MessageSampler,
    Reply,
    RunContext,
    SampledPolicy,
    Sampler,
    Sampling,
    ServerMemory,
    Session,
    TokenScores,
)

__all__ = [
    "Attend",
    "Completion",
    "Engine",
    "EngineSettings",
    "MessageSampler",
    "Reply",
    "RunContext",
    "SampledPolicy",
    "Sampler",
    "Sampling",
    "ServerMemory",
    "Session",
    "TokenScores",
]
