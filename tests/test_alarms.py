"""Alarms: raised once in runs that went wrong, silent in healthy ones."""

from __future__ import annotations

import csv
import logging
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import EarlyStopping

from pages import blocks, example
from players.plain_agent import PlainAgent
from runs import Printed, adamw, column, data, last, make_module, trainer
from turnrl import OutcomeReward, Question, Rollout, ToolCall, ToolResult, Trajectory, Turn
from turnrl.runs.alarms import FIGURES, find_alarms
from turnrl.runs.load import open_runs
from turnrl.watch.health import find_learning_warning
from turnrl.watch.metrics import MetricLog
from worlds import Answered, Echo, Letters

DATA = Path(__file__).parent / "data" / "metrics"
PAGE = (Path(__file__).parents[1] / "docs" / "howto" / "alarms.md").read_text(encoding="utf-8")

# what began, and when: each was looked up in the figures of the run
WRONG = {
    "learning_rate_x30_0": {"tool use": 3, "groups": 3},
    "learning_rate_x30_1": {"tool use": 2, "groups": 3},
    "learning_rate_x30_react_0": {"tool use": 2, "groups": 2},
    "learning_rate_x10_0": {"groups": 11, "tool use": 31},
    "learning_rate_x10_1": {"groups": 14, "tool use": 24},
    "search_cost_1_0": {"tool use": 2, "groups": 8},
    "no_baseline_0": {"tool use": 18},
    "paid_calls_8_turns_0": {"groups": 16},
    "paid_calls_4_turns_1": {"groups": 13},
    "group_size_2_0": {"groups": 23},
}
HEALTHY = sorted(path.stem for path in DATA.glob("*.csv") if path.stem not in WRONG)


def recorded(name):
    """The rows of a run that was recorded."""
    with (DATA / f"{name}.csv").open(newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def began(rows):
    return {alarm.name: alarm.began for alarm in find_alarms(rows)}


# ----------------------------------------------------------------------------- recorded runs


@pytest.mark.parametrize("name", WRONG)
def test_a_run_that_went_wrong_raises_its_alarms_where_they_began(name):
    assert began(recorded(name)) == WRONG[name]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_none(name):
    rows = recorded(name)
    assert len(rows) >= 20
    assert find_alarms(rows) == []


def test_costs_are_noticed_before_iteration_3_if_calls_cost_more_than_they_find():
    runs: dict[tuple[str, int], list[dict[str, float]]] = {}
    with (DATA.parent / "costs.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            known = {k: float(v) for k, v in row.items() if v and k != "run"}
            runs.setdefault((row["run"], int(row["seed"])), []).append(known)
    raised = {run: [alarm.noticed for alarm in find_alarms(rows)] for run, rows in runs.items()}
    two_hops = [raised.pop(("turn_level", seed)) for seed in range(8)]
    assert sum(noticed in ([1], [2]) for noticed in two_hops) == 7
    # nothing costs, calls find enough, or the estimator does not charge costs to every attempt
    kinds = {"one_hop", "no_cost", "one_hop_cost", "outcome_only", "costs_among_right"}
    assert {kind for kind, _ in raised} == kinds
    assert not any(raised.values())


# --------------------------------------------------------------------------------- the rules


def series(**figures):
    """Rows of figures, by the names in `SHORT`."""
    count = len(next(iter(figures.values())))
    return [
        {"iteration": k + 1} | {SHORT[name]: values[k] for name, values in figures.items()}
        for k in range(count)
    ]


SHORT = {
    "match": "train/exact_match",
    "tools": "train/tool_execution",
    "groups": "rollout/degenerate_groups",
}


def test_tool_use_falls():
    # levels .8 .8 .8 .8 .64 .48 .32: 0.6 x .8 = .48 is reached in iteration 6, but half of the
    # change is .64 then and .56 in iteration 7, and iteration 5 is the first beyond it
    (alarm,) = find_alarms(series(tools=[0.8, 0.8, 0.8, 0.8, 0.32, 0.32, 0.32]))
    assert (alarm.name, alarm.began, alarm.noticed) == ("tool use", 5, 7)
    assert alarm.text == "tool use fell from iteration 5 on: train/tool_execution 0.80 -> 0.32"
    assert not find_alarms(series(tools=[0.8, 0.8, 0.8, 0.8, 0.5, 0.5, 0.5]))  # above .48
    assert not find_alarms(series(tools=[0.8, 0.8, 0.8, 0.8, 0.0, 0.0, 0.7, 0.0, 0.0, 0.7]))


def test_a_fall_is_more_than_noise():
    # changes of .2 up and down: .2 / (0.6745 x 1.414) = .21 is a standard deviation. The first
    # level is a single iteration, so 5 x .21 x sqrt(1 + 1/3) = 1.21 would be a fall
    noisy = [0.8, 0.6, 0.8, 0.6, 0.4, 0.2, 0.0, 0.2]
    assert not find_alarms(series(tools=noisy))
    # the same fall at once, and quiet after it: the median of the changes is 0
    assert began(series(tools=[0.8, 0.6, 0.8, 0.6, *[0.1] * 6])) == {"tool use": 5}


def test_groups_teach_nothing_before_the_questions_are_solved():
    rows = series(groups=[0.1, 0.1, 0.6, 0.6, 0.6], match=[0.2] * 5)
    (alarm,) = find_alarms(rows)  # .6 - .2 = .4, and half of that is passed in iteration 3
    assert (alarm.name, alarm.began, alarm.noticed) == ("groups", 3, 5)
    assert "rollout/degenerate_groups 0.60, with train/exact_match 0.20" in alarm.text
    assert not find_alarms(
        series(groups=[0.1, 0.1, 0.6, 0.6, 0.6], match=[0.2, 0.3, 0.4, 0.5, 0.6])
    )
    assert not find_alarms(
        series(groups=[0.1, 0.1, 1.0, 0.1, 0.1], match=[0.2] * 5)
    )  # a single iteration


def earned(*differences, error=0.04):
    """Rows in which the others earn 0.01, and attempts that call earn `differences` more."""
    figures = {"reward/idle": 0.01, "reward/acting_error": error}
    return [
        {"iteration": k, "reward/acted": 0.01 + difference, **figures}
        for k, difference in enumerate(differences, 1)
    ]


def test_calls_cost_more_than_they_find_in_the_first_iteration():
    (alarm,) = find_alarms(earned(-0.09, 0.1, 0.1))
    assert (alarm.name, alarm.began, alarm.noticed) == ("costs", 1, 1)
    assert alarm.figures == ("reward/acted", "reward/idle")
    assert alarm.text.startswith(
        "tool calls cost more than they earn, from iteration 1 on: attempts that call earn -0.080 "
        "from turn rewards on average, the others 0.010. The policy may stop calling"
    )
    assert find_alarms(earned(-0.07)) == []  # less than two standard errors
    assert find_alarms(earned(0.09)) == []


def test_averaging_two_iterations_narrows_the_error_and_later_alarms_need_more():
    # the mean of two has an error of 0.04 / sqrt(2) = 0.0283, and 2.6 of them are needed: 0.0736
    (alarm,) = find_alarms(earned(-0.075, -0.075))
    assert (alarm.began, alarm.noticed) == (1, 2)
    assert find_alarms(earned(-0.072, -0.072)) == []
    # after 8 good ones, three in a row need sqrt(4 + 4 ln 11) = 3.69 errors of 0.0231: 0.0852
    (alarm,) = find_alarms(earned(*[0.1] * 8, -0.09, -0.09, -0.09))
    assert (alarm.began, alarm.noticed) == (9, 11)
    assert find_alarms(earned(*[0.1] * 8, -0.08, -0.08, -0.08)) == []


def test_costs_raise_no_alarm_without_a_known_error():
    rows = [{k: v for k, v in row.items() if "error" not in k} for row in earned(*[-0.3] * 9)]
    assert find_alarms(rows) == []


def test_exact_match_says_nothing_until_an_answer_was_right():
    never = {"match": [0.0] * 6}
    assert not find_alarms(series(groups=[0.1, 0.1, *[0.6] * 4], **never))
    # and says something from the first one on
    (alarm,) = find_alarms(series(groups=[0.1, 0.1, *[0.6] * 4], match=[*[0.0] * 5, 0.1]))
    assert (alarm.name, alarm.began, alarm.noticed) == ("groups", 3, 6)


# -------------------------------------------------------------------------------- bad input


def test_rows_may_lack_anything():
    rows = recorded("learning_rate_x30_0")
    whole = find_alarms(rows)
    assert len(whole) == 2
    for name in FIGURES:
        left = [{k: v for k, v in row.items() if k != name} for row in rows]
        assert {alarm.name for alarm in find_alarms(left)} <= {alarm.name for alarm in whole}
        nan = [row | {name: math.nan} for row in rows]
        assert find_alarms(nan) == find_alarms(left)
        infinite = [row | {name: math.inf} for row in rows]
        assert find_alarms(infinite) == find_alarms(left)
    for few in ([], [{}], [{"iteration": math.nan}], [{"train/entropy": 0.1}], rows[:2]):
        assert find_alarms(few) == []


# ---------------------------------------------------------------------------------- in a run


class Quiet(Letters):
    """Reads every turn as an answer, and never as a call, once it is quiet."""

    quiet = False

    def read(self, text, turn, cut):
        return super().read("a" if self.quiet else text, turn, cut)


class Silence(L.Callback):
    """Makes the tool useless after four iterations."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.rollout.segmenter.quiet = trainer.current_epoch >= 4


def goes_wrong(model, folder, epochs, *callbacks, ckpt_path=None, **options):
    """A run that calls no tool from iteration 5 on; the lines that it prints."""
    rollout = Rollout(Quiet(), [Echo()], max_turn_tokens=6, max_tokens=128)
    bar = Printed()
    shown = {"enable_progress_bar": True, "limit_val_batches": 0, **options}
    run = trainer(folder, epochs, [bar, Silence(), *callbacks], **shown)
    module = make_module(model)
    module.rollout = rollout
    run.fit(module, data(), ckpt_path=ckpt_path)
    return bar.lines


@pytest.mark.slow
def test_an_alarm_is_printed_once_and_counted_even_if_the_run_is_resumed(tiny_model, tmp_path):
    lines = goes_wrong(tiny_model, tmp_path / "whole", 12)
    (line,) = [text for text in lines if text.startswith("alarm: ")]
    assert re.fullmatch(r"alarm: tool use fell from iteration 5 on: \S+ 0\.\d+ -> 0\.00", line)
    counts = column(tmp_path / "whole", "train/alarms")
    noticed = counts.index(1)
    assert noticed >= 6
    assert counts == [0] * noticed + [1] * (12 - noticed)
    # the rules find the same in the file
    (run,) = open_runs([tmp_path / "whole" / "version_0"])
    (alarm,) = find_alarms(run.metrics)
    assert (alarm.noticed, f"alarm: {alarm.text}") == (noticed + 1, line)

    def resumed(name, epochs, checkpoint):
        lines = goes_wrong(tiny_model, tmp_path / name, epochs, ckpt_path=str(checkpoint))
        return [text for text in lines if text.startswith("alarm: ")]

    # one that was resumed before the alarm raises it where the whole run did
    assert not any("alarm" in text for text in goes_wrong(tiny_model, tmp_path / "a", 5))
    assert resumed("b", 12, last(tmp_path / "a")) == [line]
    assert [*column(tmp_path / "a", "train/alarms"), *column(tmp_path / "b", "train/alarms")] == (
        counts
    )


def test_early_stopping_ends_a_run_at_its_first_alarm(tiny_model, tmp_path):
    (block,) = (b for b in blocks("docs/howto/alarms.md") if "EarlyStopping" in b.text)
    (stop,) = yaml.safe_load(block.text)["trainer"]["callbacks"]
    goes_wrong(tiny_model, tmp_path, 20, EarlyStopping(**stop["init_args"]))
    counts = column(tmp_path, "train/alarms")
    assert counts == [0] * (len(counts) - 1) + [1]
    assert torch.load(last(tmp_path), weights_only=True)["epoch"] + 1 == len(counts) < 20


def test_two_fits_of_a_trainer_share_one_callback(tiny_model, tmp_path):
    run = trainer(tmp_path, 1, limit_val_batches=0)
    module = make_module(tiny_model)
    run.fit(module, data())
    run.fit_loop.max_epochs = 2
    run.fit(module, data())
    names = [type(callback).__name__ for callback in run.callbacks]
    assert names.count("Alarms") == names.count("LambdaCallback") == 1


def test_a_figure_that_an_iteration_lacks_is_not_carried_over():
    """Lightning keeps what was logged last."""
    state = {"validating": False, "sanity_checking": False}
    trainer = SimpleNamespace(callback_metrics={"train/entropy": torch.tensor(0.5)}, **state)
    metrics = MetricLog(SimpleNamespace(trainer=trainer, log=lambda *a, **k: None))
    metrics._log("train/entropy", 0.5)
    assert metrics.take_metrics(validating=False) == {"train/entropy": 0.5}
    assert metrics.unread_metrics(validating=False) == {}


def test_without_a_bar_an_alarm_is_logged(tiny_model, tmp_path, caplog):
    run = trainer(tmp_path, 8, [Silence()], limit_val_batches=0)
    module = make_module(tiny_model)
    module.rollout = Rollout(Quiet(), [Echo()], max_turn_tokens=6, max_tokens=128)
    run.fit(module, data())
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [text.partition(" on:")[0] for text in warned if "alarm" in text] == [
        "alarm: tool use fell from iteration 5"
    ]


# --------------------------------------------------------------------- a run that learns nothing

IDLE = {
    "rollout/truncated": 0.0,
    "train/degenerate_groups": 1.0,
    "rollout/tokens": 30.0,
    "reward/total": 0.0,
    "train/exact_match": 0.0,
    "train/format": 0.5,
}


@pytest.mark.parametrize(
    ("figures", "advice"),
    [
        ({"train/degenerate_groups": 0.9}, ""),
        ({"rollout/truncated": 1.0}, "Raise model.rollout.max_turn_tokens (it is 6)"),
        (
            {"rollout/truncated": 1.0, "rollout/tokens": 127},
            "Raise model.rollout.max_tokens (it is 128)",
        ),
        ({"train/exact_match": 1.0, "reward/total": 2.0}, "train on harder questions"),
        ({"train/format": 0.0}, "make the instructions of the segmenter Letters plainer"),
        ({}, "Add a reward that tells attempts apart"),
    ],
)
def test_the_likely_cause_and_the_first_thing_to_change_are_named(figures, advice):
    rollout = Rollout(Letters(), [Echo()], max_turn_tokens=6, max_tokens=128)
    warning = find_learning_warning(1, IDLE | figures, rollout)
    assert advice in warning
    assert bool(warning) == bool(advice)


def test_the_player_and_its_most_frequent_error_are_named():
    question = Question("q", "?", ("x",))
    contents = ["no tool 'serch'; there is search"] * 2 + ["arguments: 'query' is missing"]
    turns = [Turn("", results=(ToolResult(text, ok=False),)) for text in contents]
    turns.append(Turn("", results=(ToolResult("a page"),)))
    tried = [Trajectory(question, (turn,), "turns") for turn in turns]
    rollout = Rollout(player=PlainAgent(), tools=[Echo()])
    warning = find_learning_warning(1, IDLE | {"train/format": 0.0}, rollout, tried)
    assert "make the instructions of the player PlainAgent plainer" in warning
    assert warning.endswith(
        " 3 of 4 tool calls failed, 2 of them with the error \"no tool 'serch'; there is search\"."
    )
    mostly_fine = tried[2:]  # one of two
    warning = find_learning_warning(1, IDLE, rollout, mostly_fine)
    assert warning == find_learning_warning(1, IDLE, rollout)


class Typo(PlainAgent):
    """Calls a tool that does not exist."""

    async def play(self, attempt):
        await attempt.reply([{"role": "user", "content": "?"}])
        await attempt.call([ToolCall("ehco", {"text": "x"})])
        await attempt.reply([{"role": "user", "content": "?"}])


def test_the_warning_that_all_calls_fail_quotes_their_error(tiny_model, tmp_path, caplog):
    module = make_module(tiny_model)
    module.rollout = Rollout(player=Typo(), tools=[Echo()], max_turn_tokens=6, max_tokens=128)
    trainer(tmp_path, 1, limit_val_batches=0).fit(module, data())
    assert "with the error \"no tool 'ehco'; there is echo\"" in caplog.text


class Same(OutcomeReward):
    """Pays every trajectory alike in some iterations, and otherwise as `Answered`."""

    def __init__(self, until):
        self.until = until
        self.module = None

    def score(self, trajectory):
        alike = self.module.current_epoch in self.until
        return 0.0 if alike else Answered().score(trajectory)


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("alike", "warned"),
    [
        ((0, 1, 2, 3, 4), ["iteration 1"]),
        pytest.param((1, 3), [], marks=pytest.mark.slow),  # by chance
        ((1, 2, 3), ["iteration 4"]),
    ],
)
def test_a_run_that_learns_nothing_gets_one_warning(tiny_model, tmp_path, caplog, alike, warned):
    module = make_module(tiny_model, optimizer=adamw(1e-9))
    module.rewards = [Same(alike)]
    object.__setattr__(module.rewards[0], "module", module)
    trainer(tmp_path, 5, limit_val_batches=0).fit(module, data())
    messages = warnings(caplog)
    assert [re.search(r"iteration \d+", message)[0] for message in messages] == warned
    assert all(
        "nothing to learn from" in message and "(mean reward 0.000)" in message
        for message in messages
    )


def test_the_example_on_the_page_reads_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = Path("runs/quickstart/version_0")
    run.mkdir(parents=True)
    shutil.copy(DATA / "learning_rate_x30_0.csv", run / "metrics.csv")
    exec(example("docs/howto/alarms.md", "alarms"), {})
    assert capsys.readouterr().out.startswith("tool use 3 5 tool use fell from iteration 3 on: ")


def test_the_page_lists_the_recorded_runs_with_their_alarms():
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(path.stem for path in DATA.glob("*.csv"))
    for name, listed in rows:  # WRONG has the alarms in the order in which they are noticed
        raised = [f"{alarm} {began}" for alarm, began in WRONG.get(name, {}).items()]
        assert listed == (", ".join(raised) or "none"), name
