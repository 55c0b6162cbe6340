"""Checks that a plugin keeps its contracts, as functions to call in its tests.

    def test_my_tool_keeps_to_the_contract():
        check_tool(MyTool(), good_calls=[{"query": "Utrecht"}], bad_calls=[{"query": ""}])

Each raises an `AssertionError` that names the broken rule and the input. They need no test
framework. Only `check_engine`, which samples a policy, needs a model, and only it and
`check_estimator`, which works on tensors, need torch.

`ScriptedEngine` plays scripted texts, to try a segmenter, a tool or a reward in a whole rollout.

    tool, segmenter, player,     a check each
    reward, estimator, source,
    engine
    hacks                        tricks that rewards must not pay for
    scripted                     ScriptedEngine
    examples                     attempts at one question, to try a reward or an estimator on
    contract                     promises, and the error about a broken one
"""

from turnrl.testing.engine import check_engine
from turnrl.testing.estimator import check_estimator
from turnrl.testing.examples import example_trajectories
from turnrl.testing.hacks import check_hacks, hacked_trajectories
from turnrl.testing.player import check_player
from turnrl.testing.reward import check_reward
from turnrl.testing.scripted import ScriptedEngine
from turnrl.testing.segmenter import check_segmenter, check_turns
from turnrl.testing.source import check_source
from turnrl.testing.tool import check_tool

__all__ = [
    "ScriptedEngine",
    "check_engine",
    "check_estimator",
    "check_hacks",
    "check_player",
    "check_reward",
    "check_segmenter",
    "check_source",
    "check_tool",
    "check_turns",
    "example_trajectories",
    "hacked_trajectories",
]
