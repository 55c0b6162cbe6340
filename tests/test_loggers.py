"""Loggers that can show more than numbers get advantages by turn and transcripts."""

from __future__ import annotations

import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

import trajectories
from runs import data, last, make_module, trainer
from turnrl import TurnLevel, assign_credit
from turnrl.runs import record
from turnrl.watch.loggers import Shown, by_turn, fenced, show
from turnrl.watch.recorder import Recorder
from turnrl.watch.recorder import rows as recorded_rows

HOSTILE = [
    "<script>alert(1)</script>",
    "```\n<img src=x onerror=alert(1)>\n```",
    "````\n```\n</code></pre><b>bold</b>",
    "a\r\n```\r<i>x</i>",
    "```  \n<b>spaces after the fence</b>",
    "~~~~\n<b>x</b>\n~~~~",
    "\x02wzxhzdk:0\x03",
    "\x0b```\x0c<i>y</i>\u2028```\u2029<i>z</i>",
    "[a link](javascript:alert(1)) ![a picture](http://example.org/x.png) <http://example.org>",
    "| a | b |\n|---|---|\n| c | d |",
    "    four spaces\n\n# a title\n\n- a list\n> a quote\n&lt;b&gt; &amp;",
    "`" * 5000 + "<b>",
    "\u202eright to left\u202c \u200b",
    "<|im_end|></answer>",
    "",
]


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.text = [], ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, attrs))

    def handle_data(self, data):
        self.text += data


def hostile(count):
    """Texts put together of hostile ones."""
    draw = random.Random(0)
    for _ in range(count):
        joint = draw.choice(["", " ", "\n", "\n\n", "\r\n"])
        yield joint.join(draw.choices(HOSTILE, k=draw.randint(1, 4)))


@pytest.mark.slow
def test_nothing_in_a_fence_is_active_in_tensorboards_page():
    util = pytest.importorskip("tensorboard.plugin_util")
    for text in [*HOSTILE, *hostile(1000)]:
        page = Tags(util.markdown_to_safe_html(fenced(text) + "\n\n" + fenced("the next")))
        assert page.tags == [("pre", []), ("code", [])] * 2, text
        words = re.sub(r"[\s?\x02\x03\x0b\x0c]+", "", text)  # what Markdown drops or replaces
        assert re.sub(r"[\s?]+", "", page.text) == words + "thenext", text


def test_the_advantages_of_a_turn_come_from_the_attempts_that_took_it():
    draw = random.Random(0)
    groups = [trajectories.group(draw, n) for n in range(5)]
    credit = [assign_credit(group, TurnLevel()) for group in groups]
    kept = list(recorded_rows(groups, credit, "train", 1, 0))
    for turn, values in by_turn(groups, credit).items():
        advantages = [
            row["turns"][turn - 1]["advantage"] for row in kept if len(row["turns"]) >= turn
        ]
        assert values.tolist() == pytest.approx(advantages)
    assert by_turn([], []) == {}


# ------------------------------------------------------------------------------- TensorBoard


@pytest.fixture
def board(tiny_model, tmp_path):
    """A run of three iterations, one of them in a run that went on, as TensorBoard reads it."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for epochs, path in ((2, None), (3, last(tmp_path))):
        logger = TensorBoardLogger(str(tmp_path), name="", version=0)
        run = trainer(tmp_path, epochs, logger=logger)
        run.fit(make_module(tiny_model), data(), ckpt_path=path)
    size = {"histograms": 0, "tensors": 0, "scalars": 0}
    read = EventAccumulator(str(tmp_path / "version_0"), size_guidance=size)
    return read.Reload()


def test_tensorboard_shows_advantages_by_turn_and_transcripts(board, tmp_path):
    run = tmp_path / "version_0"
    kept = record.read(run, split="train")
    tags = board.Tags()
    assert tags["histograms"] == ["advantages/turn_1", "advantages/turn_2"]
    steps = [event.step for event in board.Scalars("reward/total")]
    assert steps == [2, 4, 6]
    for turn in (1, 2):
        shown = board.Histograms(f"advantages/turn_{turn}")
        assert [event.step for event in shown] == steps
        for iteration, event in enumerate(shown, 1):
            values = [
                row["turns"][turn - 1]["advantage"]
                for row in kept
                if row["iteration"] == iteration and len(row["turns"]) >= turn
            ]
            drawn = event.histogram_value
            assert drawn.num == len(values) > 0
            assert drawn.sum == pytest.approx(sum(values), abs=1e-4)
            assert (drawn.min, drawn.max) == pytest.approx((min(values), max(values)), abs=1e-4)
            assert sum(drawn.bucket) == len(values)
    texts = board.Tensors("transcripts/text_summary")
    assert [event.step for event in texts] == steps
    for iteration, event in enumerate(texts, 1):
        (text,) = event.tensor_proto.string_val
        whole = (run / "transcripts" / f"iteration_{iteration:04d}.txt").read_text()
        parts = whole.removesuffix("\n").split("\n" + "=" * 80 + "\n")
        assert len(parts) == 4
        assert text.decode() == "\n\n".join(map(fenced, parts))


def test_without_transcripts_there_are_only_histograms(tiny_model, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(str(tmp_path), name="", version=0)
    silent = Recorder(transcripts=0)
    run = trainer(tmp_path, 1, [silent], logger=logger, limit_val_batches=0)
    run.fit(make_module(tiny_model), data())
    tags = EventAccumulator(str(tmp_path / "version_0")).Reload().Tags()
    assert tags["histograms"] == ["advantages/turn_1", "advantages/turn_2"]
    assert tags["tensors"] == []


# ---------------------------------------------------------------------------------- the others


@pytest.mark.slow
def test_weights_and_biases_gets_both_offline(tiny_model, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger("tiny", save_dir=str(tmp_path), offline=True)
    seen = []
    log = type(logger.experiment).log
    monkeypatch.setattr(
        type(logger.experiment), "log", lambda run, row: (seen.append(row), log(run, row))[1]
    )
    trainer(tmp_path, 2, logger=logger, limit_val_batches=0).fit(make_module(tiny_model), data())
    wandb.finish()
    media = [row for row in seen if "transcripts" in row]
    assert [row["trainer/global_step"] for row in media] == [2, 4]
    for row in media:
        assert set(row) - {"transcripts", "trainer/global_step"} == {
            "advantages/turn_1",
            "advantages/turn_2",
        }
        assert sum(row["advantages/turn_1"].histogram) == 16
    pages = [Tags(file.read_text()) for file in sorted(tmp_path.rglob("transcripts_*.html"))]
    written = [file.read_text() for file in sorted(tmp_path.rglob("iteration_*.txt"))]
    assert len(pages) == len(written) == 2
    for page, text in zip(pages, written, strict=True):
        assert [tag for tag, _ in page.tags] == ["pre", "hr"] * 4
        assert page.text == text.removesuffix("\n").replace("\n" + "=" * 80 + "\n", "")


def test_a_transcript_is_escaped_for_weights_and_biases(monkeypatch):
    pytest.importorskip("wandb")
    logged = {}
    monkeypatch.setattr(WandbLogger, "log_metrics", lambda self, row, step: logged.update(row))
    for text in HOSTILE:
        show(WandbLogger(offline=True), Shown(1, {}, [text]), 2)
        page = Tags(Path(logged["transcripts"]._path).read_text())  # wandb names it nowhere else
        assert page.tags == [("pre", []), ("hr", [])], text


@pytest.mark.slow
def test_mlflow_keeps_transcripts_as_files(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger("tiny", tracking_uri=f"file:{tmp_path}")
    show(logger, Shown(7, {}, ["one", "<b>two</b>"]), 14)
    uri = mlflow.MlflowClient(f"file:{tmp_path}").get_run(logger.run_id).info.artifact_uri
    file = Path(uri.removeprefix("file://"), "transcripts", "iteration_0007.txt")
    assert file.read_text() == "one\n" + "=" * 80 + "\n<b>two</b>"


def test_your_own_logger_can_be_registered(tiny_model, tmp_path):
    class Mine(CSVLogger):
        pass

    kept = []
    show.register(Mine, lambda logger, shown, step: kept.append((shown, step)))
    mine, plain = Mine(str(tmp_path), "", 0), CSVLogger(str(tmp_path / "plain"), "", 0)
    trainer(tmp_path, 2, logger=[mine, plain], limit_val_batches=0).fit(
        make_module(tiny_model), data()
    )
    assert [(shown.iteration, step) for shown, step in kept] == [(1, 2), (2, 4)]
    assert all(len(shown.advantages[1]) == 16 for shown, _ in kept)
    assert all(len(shown.transcripts) == 4 for shown, _ in kept)
