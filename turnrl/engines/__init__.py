"""For those who write an engine: its contract, and the values that it gets and returns."""

from turnrl.types.engine import (
    Attend,
    Beside,
    Completion,
    Engine,
    EngineSettings,
    MessageSampler,
    Reply,
    SampledPolicy,
    Sampler,
    Sampling,
    Session,
    Surroundings,
    TokenScores,
)

__all__ = [
    "Attend",
    "Beside",
    "Completion",
    "Engine",
    "EngineSettings",
    "MessageSampler",
    "Reply",
    "SampledPolicy",
    "Sampler",
    "Sampling",
    "Session",
    "Surroundings",
    "TokenScores",
]
