"""`turnrl bench gpu` on a CPU, in its tiny shape: every part runs, the error of one leaves the
others alone, and measured results stay. No speed here means anything."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from commands import fails
from turnrl import RecipeError
from turnrl.cli import main
from turnrl_bench.command import parts_named
from turnrl_bench.gpu import decoding, driver, floors, learning, worker
from turnrl_bench.gpu.bench import Bench
from turnrl_bench.gpu.floors import Cost
from turnrl_bench.gpu.parts import PARTS, SEVEN_B, WHOLE, Part
from turnrl_bench.gpu.report import NONE, show, tables_of
from turnrl_bench.gpu.results import Cases, Lacking, Results
from turnrl_doctor.counts import FOUR_BIT
from turnrl_doctor.work import Work

ROOT = Path(__file__).parents[1]
quiet = pytest.mark.filterwarnings("ignore")  # a user's script shows Lightning's remarks
TINY = ("bench", "gpu", "--tiny", "--threads", "1")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """All parts, measured in this process."""
    folder = tmp_path_factory.mktemp("gpu")
    results = Results(folder / "found.json")
    results.describe(tiny=True)
    for part in PARTS.values():
        results.note(part.name, status="running")
        worker.measure(str(results.file), str(folder), part.name, part.function, True, 300)
        results.read()
    return Bench(folder, True, results)


def part(name, function="right", least_s=0.0, most_s=100.0):
    return Part(name, f"bench_parts:{function}", least_s, most_s)


# -------------------------------------------------------------------------------- all of it


@quiet
def test_every_part_runs_without_a_gpu_and_every_case_is_there(bench):
    parts = bench.results.parts
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(PARTS, "done")
    machine, loading = (parts[name]["cases"] for name in ("machine", "loading"))
    assert machine["versions"]["torch"] == importlib.metadata.version("torch")
    assert machine["copy"]["rate"] > 1e6
    assert loading["nf4"]["share_prefixes"] is True
    assert "attention while learning" in loading["nf4"]["in_force"]
    assert "attention while sampling" in loading["nf4"]["in_force"]


@quiet
def test_each_way_of_sampling_has_its_rate_and_its_floor(bench):
    for name, case in bench.results.part("decoding")["cases"].items():
        assert case["tokens_per_s"] == pytest.approx(case["sampled"] / case["wave_s"]), name
        assert case["ratio"] == pytest.approx(case["wave_s"] / case["floor_s"])


@quiet
def test_a_minibatch_is_measured_in_parts_with_activations_kept_and_computed_again(bench):
    cases = bench.results.part("learning")["cases"]
    for name in ("recomputed", "kept"):
        case = cases[name]
        parts = sum(case[f"{part}_s"] for part in ("forward", "head", "backward"))
        assert parts == pytest.approx(case["minibatch_s"], rel=0.5)
        # 2 prompts of 160 read once, as are other beginnings, and 4 trajectories
        assert 320 < case["tokens"] < 4 * 300
        assert case["trajectories"] == 4
        assert case["asked"] == 4 * 48


@quiet
def test_an_iteration_has_its_phases_a_floor_and_no_plan(bench):
    case = bench.results.case("iteration", "iteration")
    assert case["sampled"] == 4 * 48
    phases = ("rollouts", "learning", "whole")
    floor = {phase: case[phase]["floor_s"] for phase in phases}
    assert floor["whole"] == pytest.approx(floor["rollouts"] + floor["learning"])
    taken = [case["rollouts"]["rollouts_s"], case["learning"]["learning_s"]]
    assert sum(taken) < case["whole"]["whole_s"]
    assert case["plan"] == "no plan"


@quiet
def test_the_tables_have_no_gap_but_a_gpus_memory_and_fit_a_terminal(bench):
    assert all(len(line) <= 80 for line in show(bench.results, markdown=False).splitlines())
    tables = tables_of(bench.results)
    empty = [(t.header[0], row[0]) for t in tables for row in t.rows if NONE in row]
    assert {name for _, name in empty} == {
        *("peak memory", "rollouts", "learning, 2 passes", "peak memory while loading"),
    }


def test_the_performance_page_shows_the_measured_tables():
    folder = ROOT / "docs" / "explanation"
    page = (folder / "performance.md").read_text()
    for table in tables_of(Results(folder / "bench-gpu-h100.json")):
        assert table.show(markdown=True) in page
    for table in tables_of(Results(Path("none.json"))):
        assert all(NONE in row for row in table.rows)


def test_an_attention_by_name_that_does_not_work_here_is_lacking(tmp_path):
    bench = Bench(tmp_path, True, Results(tmp_path / "found.json"))
    with pytest.raises(Lacking, match="attention is 'triton', which takes bfloat16"):
        decoding.sample(bench, decoding.Case(rows=4, attention="triton"))


def test_a_case_that_a_machine_cannot_run_is_skipped(tmp_path):
    def case():
        raise Lacking("flash_attn_interface is not installed")

    results = Results(tmp_path / "found.json")
    results.note("some", status="running")
    Cases(results, "some", time.monotonic() + 5).run("fa3", case)
    assert results.part("some")["cases"]["fa3"] == {
        "status": "skipped",
        "why": "flash_attn_interface is not installed",
    }


# ----------------------------------------------------------------- errors, time, and resuming


def test_parts_and_cases_without_enough_time_say_why(tmp_path):
    results = Results(tmp_path / "found.json")
    driver.drive(results, [part("late", least_s=1.0)], tmp_path, True, 0.5 / 60, 1)
    assert results.part("late")["status"] == "skipped"
    assert results.part("late")["why"] == "takes 1 s at least, and 0 s are left"
    results = Results(tmp_path / "found.json")
    results.note("slow", status="running")
    cases = Cases(results, "slow", time.monotonic() + 5)
    cases.run("long", dict, least_s=30)
    assert results.part("slow")["cases"]["long"]["why"] == "needs about 30 s, and 5 s are left"


def test_a_case_that_was_measured_is_not_measured_again(tmp_path):
    asked = []

    def case(name):
        return lambda: asked.append(name) or {"value": name}

    first = Cases(Results(tmp_path / "found.json"), "some", time.monotonic() + 50)
    first.results.note("some", status="running")
    first.run("a", case("a"))
    first.run("b", lambda: 1 / 0)
    first.results.end("some")
    assert first.results.part("some")["status"] == "partial"
    again = Cases(Results(tmp_path / "found.json"), "some", time.monotonic() + 50)
    again.run("a", case("a again"))
    again.run("b", case("b"))
    assert [again.results.case("some", name)["value"] for name in "ab"] == ["a", "b"]
    again.results.end("some")
    assert asked == ["a", "b"]
    assert Results(tmp_path / "found.json").part("some")["status"] == "done"


@pytest.mark.slow
def test_a_part_that_raises_or_dies_records_its_error_and_the_others_run(
    tmp_path, monkeypatch, capfd, nursery
):
    nursery.stand_in(monkeypatch)
    results = Results(tmp_path / "found.json")
    raising, ending = ("breaks", "one_case_breaks", "interrupted"), ("dies", "hangs", "right")
    for name in raising:
        results.note(name, status="running")
        worker.measure(str(results.file), str(tmp_path), name, f"bench_parts:{name}", True, 50)
        results.read()
    parts = [part(name, name, most_s=0.5 if name == "hangs" else 100) for name in ending]
    driver.drive(results, parts, tmp_path, True, 200.5 / 60, 1, grace_s=6)
    names = (*raising, *ending)
    measured = Results(tmp_path / "found.json").parts
    statuses = ["error", "partial", "error", "error", "error", "done"]
    assert [measured[name]["status"] for name in names] == statuses
    assert measured["breaks"]["error"] == "ValueError: the part itself"
    assert measured["breaks"]["cases"]["good"]["value"] == 1
    assert any("in breaks" in line for line in measured["breaks"]["where"])
    full = measured["one_case_breaks"]["cases"]["full"]
    assert full["error"] == "OutOfMemoryError: tried to allocate 72 GB"
    assert measured["one_case_breaks"]["cases"]["good"]["value"] == 2
    assert measured["interrupted"]["error"].startswith("KeyboardInterrupt")
    assert measured["dies"]["error"] == "its process ended with 9"
    assert measured["dies"]["cases"]["before"]["value"] == 3
    assert measured["hangs"]["error"] == "it did not come back in time"
    shown = capfd.readouterr().err
    assert "dies: error its process ended with 9" in shown
    assert "in hangs" in shown


@pytest.mark.slow
def test_an_interrupted_command_keeps_its_results_and_resumes(tmp_path, capsys):
    file, folder = tmp_path / "found.json", tmp_path / "models"
    folder.mkdir()
    command = [sys.executable, "-m", "turnrl", *TINY, "--json", str(file)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    running = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    while running.poll() is None and "loading" not in Results(file).parts:
        time.sleep(0.05)
    assert list(folder.glob("turnrl-bench-gpu-*"))
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 128 + signal.SIGTERM
    assert list(folder.iterdir()) == []
    kept = Results(file).part("machine")["cases"]
    assert Results(file).part("loading")["error"] == "it was interrupted"
    # what is there is not measured again, and not overwritten
    only = [*TINY, "--parts", "machine", "--json", str(file)]
    assert "Add --resume to add to it" in fails(capsys, only)
    assert main([*only, "--resume", "--markdown"]) == 0
    assert Results(file).part("machine")["cases"] == kept
    assert "| a copy, read and written |" in capsys.readouterr().out


def test_a_folder_of_a_run_that_was_killed_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    old, other = (tmp_path / f"turnrl-bench-gpu-{n}-x" for n in (ended.pid, os.getpid()))
    old.mkdir()
    other.mkdir()
    with driver.models(0) as folder:
        assert folder.is_dir()
        assert not old.exists()
        assert other.exists()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--parts", "machine,sampling"],
            "there is no part 'sampling'. Choose from: machine",
        ),
        (["--resume", "--json", "OTHER"], "is not a file of 'turnrl bench gpu'"),
        (["--resume", "--json", "WHOLE"], "has results of the whole shape"),
    ],
)
def test_a_mistake_is_a_sentence(tmp_path, capsys, arguments, message):
    (tmp_path / "OTHER").write_text('{"blocks": []}')
    (tmp_path / "WHOLE").write_text('{"about": {"tiny": false}, "parts": {"machine": {}}}')
    named = [str(tmp_path / a) if a.isupper() else a for a in arguments]
    assert message in fails(capsys, [*TINY, "--json", str(tmp_path / "new"), *named])


def test_a_disk_without_room_is_refused_before_anything_is_made():
    wanted = pytest.raises(RecipeError, match=r"takes 1000000.0 GB, .* Set TMPDIR")
    with wanted, driver.models(10**15):
        pass


# ------------------------------------------------------------------------------ arithmetic


def test_the_least_work_of_a_7b_step_is_counted_by_hand():
    net = Work(SEVEN_B, size=2, rank=16)
    # 28 x (2 x 3584^2 + 2 x 3584 x 512 + 3 x 3584 x 18944)
    assert net.shape.dense == 6_525_288_448
    # 28 x 16 x (2 x 7168 + 2 x 4096 + 3 x 22528)
    assert net.trained == 40_370_176
    assert net.kv_bytes == 57_344
    assert floors.weights_bytes(net, "dense") == 2 * (6_525_288_448 + 40_370_176)
    # an unread table of embeddings is not among what is read
    assert floors.weights_bytes(net, "nf4") == 6_525_288_448 * FOUR_BIT + 2 * 40_370_176
    weights, attention, head = floors.decode_step(net, "dense", rows=128, history=128 * 1000)
    assert weights.flops == 2 * (6_525_288_448 + 40_370_176) * 128
    assert attention.bytes == 128_000 * 57_344
    # a query meets each key twice, in 28 heads of 128
    assert attention.flops == 4 * 28 * 28 * 128 * 128_000
    assert (head.bytes, head.flops) == (2 * 3584 * 152_064, 2 * 3584 * 152_064 * 128)
    best = (4e12, 700e12)
    # memory bound: 13.13 GB, 7.34 GB and 1.09 GB at 4 TB/s
    all_three = floors.seconds([weights, attention, head], *best)
    assert all_three == pytest.approx(21.56e9 / 4e12, rel=1e-3)
    assert floors.seconds([Cost(4e12, 1400e12)], *best) == 2


def test_the_least_work_of_learning_is_counted_by_hand():
    shape = replace(
        SEVEN_B, hidden=1536, inner=8960, heads=12, kv_heads=2, vocab=151_936, tied=True
    )
    net = Work(shape, size=2, rank=16)
    # 28 x (2 x 1536^2 + 2 x 1536 x 256 + 3 x 1536 x 8960) = Qwen2.5-1.5B without its embeddings
    assert net.shape.dense == 1_310_195_712
    linear, attention, elementwise, head = floors.learning(net, "dense", 8000, 4_000_000, 2000)
    assert linear.flops == 4 * net.shape.dense * 8000 + 6 * net.trained * 8000
    assert attention.flops == 3 * 4 * 1536 * 28 * 4_000_000
    # a layer: 8 x 1536 + 2 x 1792 + 3 x 8960 values of 2 bytes, forward, and twice that backward
    assert elementwise.bytes == 3 * 8000 * 28 * 2 * (12_288 + 3584 + 26_880)
    assert head.flops == 4 * 1536 * 151_936 * 2000


def test_steps_of_ragged_turns_match_a_token_by_token_walk():
    histories, lengths = [5, 7, 11], [1, 4, 3]
    walked: dict[int, list[int]] = {}
    for history, length in zip(histories, lengths, strict=True):
        for t in range(1, length):  # the first token comes with what was read before
            walked.setdefault(t, []).append(history + t)
    wanted = [(len(seen), sum(seen)) for _, seen in sorted(walked.items())]
    assert floors.turn_steps(histories, lengths) == wanted == [(2, 20), (2, 22), (1, 10)]
    assert floors.pairs_of(10, 3) == 11 + 12 + 13


def test_a_wave_of_ragged_turns_has_room_for_its_longest_history():
    wave = decoding.Wave.drawn(128, WHOLE.shape, WHOLE.turns, 1000)
    assert (wave.rows, len(wave.prompts), wave.group) == (128, 8, 16)
    assert {len(set(lengths)) > 20 for lengths in wave.lengths} == {True}
    assert min(wave.lengths[0]) >= 24
    assert max(wave.lengths[0]) <= 72
    longest = max(600 + a + 500 + b for a, b in zip(*wave.lengths, strict=True))
    assert wave.longest == longest
    assert decoding.Wave.drawn(336, WHOLE.shape, WHOLE.turns, 1000).rows == 336
    # each prompt once, 336 results, and a step less than the longest turn for each turn
    costs = wave.costs(Work(SEVEN_B, size=2, rank=16), "dense")
    steps = sum(max(lengths) - 1 for lengths in wave.lengths)
    assert len(costs) == 4 + 4 + 3 * steps


def test_every_row_of_the_table_is_a_case_that_is_measured():
    cases = [case.name for case in decoding.cases_of((128, 336), ("gather",))]
    assert len(cases) == len(set(cases)) == 13
    assert "dense copy, graphs on, 128 rows, attention gather" in cases
    kinds = ("dense copy", "nf4 + adapter", "dense + adapter")
    for rows in (128, 336):
        for graphs in ("on", "off"):
            assert {f"{kind}, graphs {graphs}, {rows} rows" for kind in kinds} <= set(cases)


@quiet
def test_a_shared_layout_counts_pairs_once_per_distinct_prefix(bench):
    rows = [([1, 2, 3, *rest], [False] * 4 + [True] * 2) for rest in ([4, 5, 6], [4, 7, 8])]
    policy = bench.policy("nf4")
    for share in (True, False):
        policy.way = policy.way._replace(share=share)
        (_, layout), *_ = policy.forward_passes(rows, 64)
        whole = [tuple(ids[:n]) for ids, _ in rows for n in range(1, len(ids) + 1)]
        wanted = sum(map(len, set(whole) if share else whole))
        assert learning.counts_of(layout) == (8 if share else 12, wanted, 4)
    policy.way = policy.way._replace(share=True)


def test_parts_run_by_priority_whatever_the_requested_order():
    assert [part.name for part in parts_named("iteration, machine")] == ["machine", "iteration"]
    assert all(part.least_s <= part.most_s for part in PARTS.values())
