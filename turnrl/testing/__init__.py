"""Checks that a plugin keeps its contracts, as functions to call in its tests.

    def test_my_tool_keeps_to_the_contract():
        check_tool(MyTool(), good_calls=[{"query": "Utrecht"}], bad_calls=[{"query": ""}])

Each raises an `AssertionError` that names the broken rule and the input. They need no test
framework. Only `check_engine`, which samples a policy, needs a model, and only it,
`check_estimator` and `check_objective`, which work on tensors, need torch.

`ScriptedEngine` plays scripted texts, to try a segmenter, a tool or a reward in a whole rollout.

    tool, segmenter, player,     a check each
    reward, estimator, source,
    objective, engine
    hacks                        tricks that rewards must not pay for
    scripted                     ScriptedEngine
    examples                     attempts at one question, to try a reward or an estimator on
    contract                     promises, and the error about a broken one
"""

from typing import TYPE_CHECKING

from turnrl.plugin.hooks import make_lazy

if TYPE_CHECKING:
    from turnrl.testing.engine import check_engine as check_engine
    from turnrl.testing.estimator import check_estimator as check_estimator
    from turnrl.testing.examples import example_trajectories as example_trajectories
    from turnrl.testing.hacks import check_hacks as check_hacks
    from turnrl.testing.hacks import hacked_trajectories as hacked_trajectories
    from turnrl.testing.objective import check_objective as check_objective
    from turnrl.testing.player import check_player as check_player
    from turnrl.testing.reward import check_reward as check_reward
    from turnrl.testing.scripted import ScriptedEngine as ScriptedEngine
    from turnrl.testing.segmenter import check_segmenter as check_segmenter
    from turnrl.testing.segmenter import check_turns as check_turns
    from turnrl.testing.source import check_source as check_source
    from turnrl.testing.tool import check_tool as check_tool

__getattr__, __all__ = make_lazy(__name__, __file__)
