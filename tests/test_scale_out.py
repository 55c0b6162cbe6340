"""docs/scale_out.py: machines that are not there yet, and servers of a known speed that are."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nodes import free_port
from serving import trained_policy
from turnrl import Sampling, on_loop
from turnrl_vllm import VLLM

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


def test_a_server_takes_the_time_that_its_steps_take(script):
    rates = script.Server(step_s=1, row_s=0.1, read_s=0.01, rows=2, chunk=30)
    env = simpy.Environment()
    server, ended = script.Sampler(env, rates), []

    def attempt(read, sampled):
        yield server.turn(read, sampled)
        ended.append(env.now)

    for read, sampled in ((40, 2), (0, 1), (10, 1)):
        env.process(attempt(read, sampled))
    env.run()
    # by hand: 30 tokens of the first are read while the second gets its only one; then 10 more, and
    # those of the third, whose place is free by now, and both get one; then the first has its last
    first = 1 + 0.1 + 0.3
    second = first + 1 + 0.2 + 0.2
    assert ended == pytest.approx([first, second, second + 1.1])
    assert server.busy_s == pytest.approx(second + 1.1)


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


def test_a_run_that_collects_ahead_waits_for_the_longer_of_both(script):
    rates = script.Rates(work=script.Work(questions=6, group=4))
    for learner in (1e-6, 1e-3):
        changed = replace(rates, learner=script.Learner(learner))
        after, ahead = (script.Run(changed, 1, 1, n, iterations=8).play() for n in (0, 1))
        assert after.iteration == pytest.approx(after.collecting + after.learning + after.giving)
        longer = max(ahead.collecting, ahead.learning + ahead.giving)
        assert ahead.iteration == pytest.approx(longer, rel=0.1)


@pytest.mark.parametrize(("size", "cards"), [("7B", [1, 2]), ("32B", [4])])
def test_the_tables_on_the_page_match_the_script(script, size, cards):
    for staleness in (0, 1):
        rows = script.table(script.SIZES[size], cards, staleness).splitlines()
        assert len(rows) > 2
        assert [row for row in rows if row not in PAGE] == []


@pytest.mark.slow
def test_every_table_of_the_page_is_printed_by_the_command():
    printed = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    for row in printed.stdout.splitlines():
        assert not row.startswith("|") or row in PAGE


def test_the_first_row_matches_the_measured_times(script):
    """On an H100: rollouts of 14.5 s and learning of 39.8 s, with lengths that were forced."""
    work = script.Work(questions=21, spread=0, tool_s=0)
    simulated = script.Run(replace(script.SIZES["7B"], work=work), 1, None).play()
    assert simulated.collecting == pytest.approx(14.5, rel=0.03)
    assert simulated.learning == pytest.approx(39.8, rel=0.01)


def test_the_command_of_the_page_takes_other_rates(monkeypatch, capsys, script):
    (words,) = re.findall(r"^python docs/scale_out.py (--size.*)$", PAGE, re.M)
    monkeypatch.setattr(sys, "argv", ["scale_out.py", *words.split()])
    script.main()
    printed = capsys.readouterr().out
    assert printed.count("\n| 4 |") == 2  # in turn and ahead
    # a server is faster than on the page, and the network is slower
    (row,) = re.findall(
        r"^\| 1 \| 1, in turn \| \S+ s \| (\S+) s \| \S+ s \| (\S+) s ", printed, re.M
    )
    assert float(row[0]) < 17  # 18.0
    assert float(row[1]) == pytest.approx(161.5e6 / 1.2e8 + 0.2, abs=0.06)


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("server.stepp_s=1", "there is no rate 'server.stepp_s'"),
        ("serve.step_s=1", "there is no rate 'serve.step_s'"),
        ("server.step_s=fast", "'server.step_s=fast' gives no number above 0"),
        ("work.sampled=3", "there is no rate 'work.sampled'"),
        ("server.rows=0", "'server.rows=0' gives no whole number above 0"),
        ("server.rows=1.5", "'server.rows=1.5' gives no whole number above 0"),
        ("network.bytes_s=0", "'network.bytes_s=0' gives no number above 0"),
        ("learner.token_s=inf", "'learner.token_s=inf' gives no number above 0"),
    ],
)
def test_an_unknown_rate_or_value_is_named(monkeypatch, script, word, problem):
    monkeypatch.setattr(sys, "argv", ["scale_out.py", "--set", word])
    with pytest.raises(SystemExit, match=f"^scale_out.py: {problem}"):
        script.main()


@pytest.mark.slow  # times, for a quiet machine
@pytest.mark.parametrize("count", [1, 2, 3])
def test_local_servers_take_as_long_as_is_computed(script, tiny_model, count):
    server = script.Server(step_s=0.02, row_s=0.002, read_s=0.0002, rows=8)
    work = script.Work(6, 8, prompt=40, sampled=(16, 10), result=20, tool_s=0.05)
    rates = script.Rates(work, server)
    computed = script.Run(rates, count, None).play().collecting
    ports = [free_port() for _ in range(count)]
    numbers = (server.step_s, server.row_s, server.read_s, server.rows)
    command = [sys.executable, ROOT / "tests" / "paced_server.py"]
    processes = [subprocess.Popen([*command, str(p), *map(str, numbers)]) for p in ports]
    time.sleep(2)
    policy = trained_policy(tiny_model)
    engine = VLLM(url=[f"http://127.0.0.1:{port}" for port in ports], max_logprob_gap=1e9).build()
    draw = random.Random(1)

    async def attempt(question: int) -> None:
        session = engine.open([question] * work.prompt)
        for number, mean in enumerate(work.sampled):
            if number:
                await asyncio.sleep(work.tool_s)
            share = draw.uniform(1 - work.spread, 1 + work.spread)
            new = [draw.randrange(50)] * work.result if number else []
            await session.generate(new, Sampling(max(1, round(mean * share))))
        session.close()

    async def collection() -> float:
        began = time.monotonic()
        every = [attempt(question) for question in range(work.questions) for _ in range(work.group)]
        await asyncio.gather(*every)
        return time.monotonic() - began

    try:
        engine.start(policy, 1000)
        engine.sync(0)
        on_loop(collection())  # connections
        measured = sorted(on_loop(collection()) for _ in range(5))[2]
    finally:
        engine.close()
        for process in processes:
            process.kill()
            process.wait()
    print(f"\n{count} servers: {measured:.2f} s, computed {computed:.2f} s")
    assert measured == pytest.approx(computed, rel=0.15)
