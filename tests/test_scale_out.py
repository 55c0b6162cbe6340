"""The tables of docs/explanation/scale-out.md are what docs/scale_out.py computes."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

simpy = pytest.importorskip("simpy")
ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "scale_out.py"
PAGE = (ROOT / "docs" / "explanation" / "scale-out.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("scale_out", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["scale_out"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["scale_out"]


def test_an_iteration_of_equal_attempts_matches_the_time_computed_by_hand(script):
    work = script.Work(3, 4, prompt=50, sampled=(20, 10), result=30, spread=0, tool_s=0.5)
    server = script.Server(step_s=0.01, row_s=0.002, read_s=0.001, rows=12)
    network = script.Network(bytes_s=1e6, adapter=5e5, load_s=0.25)
    rates = script.Rates(work, server, script.Learner(0.003), network)
    alone = script.Run(rates, servers=1, learners=None).play()
    # three prompts are read, and one token of each other; later each attempt reads its result
    turns = 30 * (0.01 + 12 * 0.002) + 0.001 * (3 * 50 + 9 * 1 + 12 * 30)
    assert alone.collecting == pytest.approx(turns + 0.5)
    assert alone.learning == pytest.approx(2 * 12 * (50 + 20 + 30 + 10) * 0.003)
    assert alone.giving == pytest.approx(0.5 + 0.25)
    assert alone.iteration == pytest.approx(alone.collecting + alone.learning + alone.giving)
    # with two learners one of them has two of three groups, and each step adds gradients once
    two = script.Run(rates, servers=1, learners=2).play()
    assert two.learning == pytest.approx(alone.learning * 2 / 3 + 2 * 4 * 0.5)


@pytest.mark.parametrize(("size", "cards"), [("7B", [1, 2]), ("32B", [4])])
def test_the_tables_on_the_page_match_the_script(script, size, cards):
    for staleness in (0, 1):
        rows = script.table(script.SIZES[size], cards, staleness).splitlines()
        assert len(rows) > 2
        assert [row for row in rows if row not in PAGE] == []


def test_the_first_row_matches_the_measured_times(script):
    """On an H100: rollouts of 14.5 s and learning of 39.8 s, with lengths that were forced."""
    work = script.Work(questions=21, spread=0, tool_s=0)
    simulated = script.Run(replace(script.SIZES["7B"], work=work), 1, None).play()
    assert simulated.collecting == pytest.approx(14.5, rel=0.03)
    assert simulated.learning == pytest.approx(39.8, rel=0.01)
