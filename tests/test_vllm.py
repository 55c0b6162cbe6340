"""The settings of `VLLM`, and vLLM itself. What `VLLM` shares with other engines is tried in
`test_server_engines`, and a server that the run starts in `test_vllm_own_server`.

The slow tests need an interpreter with vLLM: `TURNRL_TEST_VLLM_PYTHON=.../bin/python`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from serving import (
    IGNORE_PEFT_WARNING,
    STARTER,
    VLLM_PYTHON,
    kind,
    needs_vllm,
    perturb,
    refusal,
    sleeps_and_samples,
    start_server,
)
from turnrl import Policy, RecipeError
from turnrl.policy.settings import Lora
from turnrl.testing import check_engine
from turnrl_vllm import VLLM

__all__ = ["kind", "start_server"]  # fixtures
pytestmark = IGNORE_PEFT_WARNING


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "url is None, and model.engine.python is None"),
        (
            {"url": "http://a:1", "python": "python"},
            "url is 'http://a:1', and model.engine.python is",
        ),
        ({"url": "http://a:1/v1"}, "without /v1"),
        ({"url": []}, "give an address"),
        ({"python": "python", "base": "mine"}, "base is 'mine'"),
        ({"url": ["http://a:1", "http://a:1"]}, "several different ones"),
        ({"url": "a:1"}, "must look like"),
        (
            {"url": "http://a:1", "arguments": ["--x"]},
            "arguments is .*goes with model.engine.python",
        ),
        ({"url": "http://a:1", "keeps": 0}, "keeps"),
        ({"url": "http://a:1", "timeout_s": -1}, "timeout_s"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        VLLM(**settings)


@pytest.mark.parametrize("url", ["http://me:hunter2@a:1", ["http://me:hunter2@a:1"] * 2])
def test_an_address_with_a_password_is_refused_and_not_shown(url):
    with pytest.raises(RecipeError, match="url holds a user, a password or a query") as refused:
        VLLM(url=url)
    assert "hunter2" not in str(refused.value)


def test_a_name_that_no_server_has_for_its_base_is_refused(start_server, tiny_model):
    engine = VLLM(url=start_server().url, base="other").build()
    assert "model.engine.base is 'other', and vLLM at " in refusal(
        engine, Policy(str(tiny_model)).build()
    )
    assert "serves base." in refusal(engine, Policy(str(tiny_model)).build())


# -------------------------------------------------------------------------------------- vLLM itself


def served(policy: Policy, folder: Path, **settings) -> VLLM:
    """An engine that has started vLLM."""
    engine = VLLM(
        python=str(VLLM_PYTHON),
        arguments=["--enforce-eager", "--max-num-seqs", "64"],
        folder=str(folder),
        **settings,
    ).build()
    engine.check(policy, 256)
    return engine


@pytest.fixture
def small_cache(monkeypatch):
    """On a CPU vLLM takes a share of the machine's memory for keys and values, unless it is told
    how many GB."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.mark.slow
@needs_vllm
class TestReal:
    @pytest.mark.parametrize("whole", [False, True])
    def test_it_keeps_the_contract(self, small_cache, tmp_path, whole):
        policy = Policy(STARTER, lora=None if whole else Lora(r=16)).build()
        perturb(policy)
        check_engine(served(policy, tmp_path), policy)

    @pytest.mark.parametrize("whole", [False, True])
    def test_it_sleeps_while_nothing_is_sampled(self, small_cache, tmp_path, whole):
        policy = Policy(STARTER, lora=None if whole else Lora(r=16)).build()
        perturb(policy)
        engine = served(policy, tmp_path, sleeps=True)
        sleeps_and_samples(engine, policy)
        engine.close()
