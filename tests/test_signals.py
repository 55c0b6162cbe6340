"""SIGTERM and Ctrl-C: a run stops at once, wherever it is, and can go on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback

from commands import TESTS, TWO, recipe
from nursery import command
from turnrl import RecipeError, cli
from worlds import Echo

WITHIN_S = 5.0


class Slow(Echo):
    """Says that it was called, and takes a minute to answer."""

    def run(self, calls):
        print("COLLECTING", flush=True)
        time.sleep(60)
        return super().run(calls)


class Says(Callback):
    """Says that a step has begun."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        print("STEPPING", flush=True)


def fit(folder, *options, nursery=None, launcher=(), stderr=subprocess.STDOUT):
    """Start a run: as a user does, or from a nursery."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    words = ["fit", "run.yaml", *options]
    return subprocess.Popen(
        command(*words) if nursery else [sys.executable, *launcher, "-m", "turnrl", *words],
        cwd=folder,
        env={**os.environ, **(nursery.environment if nursery else {}), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
        # a shell starts what runs in the background with Ctrl-C off
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def started(folder, model, where, processes, nursery):
    """A run that is in the middle of a collection, or of a step of seconds."""
    recipe(model, folder / "run.yaml", **(TWO if processes == 2 else {}))
    contents = yaml.safe_load((folder / "run.yaml").read_text())
    contents["trainer"] |= {"callbacks": ["test_signals.Says"], "max_epochs": 50}
    if where == "COLLECTING":
        contents["model"]["rollout"]["tools"] = ["test_signals.Slow"]
        contents["data"]["val"] = None  # else it is there that the run waits
    else:
        # some 500 passes of a trajectory each
        contents["model"] |= {"group_size": 128, "steps_per_pass": 1}
        contents["model"]["policy"]["minibatch_tokens"] = 1
    (folder / "run.yaml").write_text(yaml.safe_dump(contents))
    process = fit(folder, nursery=nursery)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if where in line:
            return process
    raise AssertionError("".join(lines))


def stops(folder, model, sent, where, processes, receivers, nursery=None):
    process = started(folder, model, where, processes, nursery)
    time.sleep(0.3)
    family = [p.pid for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(folder)]
    # before each that a nursery made stands the one that asked for it; libraries may have more
    assert len(family) >= processes * (2 if nursery else 1)
    begun = time.perf_counter()
    (os.killpg if receivers == "all" else os.kill)(process.pid, sent)
    printed = process.communicate(timeout=60)[0]
    took = time.perf_counter() - begun
    assert process.returncode == 128 + sent, printed
    assert took < WITHIN_S
    assert "Traceback" not in printed
    checkpoint = "runs/run/version_0/checkpoints/last.ckpt"
    assert f"--ckpt_path {checkpoint}" in printed
    assert torch.load(folder / checkpoint, weights_only=True)["global_step"] == 0
    for pid in family:
        gone = not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        assert gone, f"process {pid} is left"


def test_sigterm_stops_a_step(tiny_model, tmp_path, nursery):
    stops(tmp_path, tiny_model, signal.SIGTERM, "STEPPING", 1, "the first", nursery)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "where", "receivers"),
    [(signal.SIGTERM, "COLLECTING", "the first"), (signal.SIGINT, "STEPPING", "all")],
)
def test_a_signal_stops_both_processes(tiny_model, tmp_path, sent, where, receivers):
    stops(tmp_path, tiny_model, sent, where, 2, receivers)


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [1.0, 4.0])
def test_sigterm_while_a_run_begins(tiny_model, tmp_path, after_s):
    recipe(tiny_model, tmp_path / "run.yaml", **TWO)
    process = fit(tmp_path, "--trainer.max_epochs", "200")
    time.sleep(after_s)
    family = psutil.Process(process.pid).children(recursive=True)
    begun = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=60)[0]
    assert time.perf_counter() - begun < WITHIN_S
    # Python itself may not have got as far as turnrl
    assert process.returncode in (128 + signal.SIGTERM, -signal.SIGTERM), printed
    assert "Traceback" not in printed
    for child in family:
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_process_ends_with_the_one_that_started_it(tmp_path):
    # the child waits in a call that hears no signal, as a collective one does
    child = (
        "import signal, time; from turnrl.plugin.signals import end_with_parent; end_with_parent();"
    )
    child += "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True);"
    child += "time.sleep(60)"
    parent = "import os, subprocess, sys; from turnrl.plugin.signals import end_with_parent;"
    parent += "end_with_parent(); subprocess.run([sys.executable, '-c', sys.argv[1]], "
    parent += "env={**os.environ, 'LOCAL_RANK': '1'})"
    command = [sys.executable, "-c", parent, child]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    (started,) = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    process.stdout.close()
    started.wait(10)


def test_an_interrupt_inside_of_exec_gives_the_same_exit_code(tmp_path):
    # classes of the standard library are made by `exec`, so imports are full of it
    (tmp_path / "stopped.py").write_text("""
import sys
import threading
import turnrl.cli
turnrl.cli._dispatch = lambda arguments: exec("raise KeyboardInterrupt")
sys.exit(turnrl.cli.main(["fit"]))
""")
    command = [sys.executable, "-m", "stopped"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr == "\nturnrl: stopped by Ctrl-C\n"


def test_stopping_allows_time_for_cleanup_and_leaves_other_alarms_alone():
    script = """
import os, signal, time
from turnrl.plugin.signals import interrupt_on_sigterm
rang = []
signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.2)
with interrupt_on_sigterm():
    time.sleep(0.4)
assert rang == [1]
class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
try:
    with interrupt_on_sigterm() as came:
        try:
            late = Late()
            del late
            time.sleep(5)
            print("nobody heard")
        finally:
            time.sleep(2.5)
            print("ended", flush=True)
except KeyboardInterrupt:
    print("stopped by", came[0])
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "ended\nstopped by 15\n"
    assert done.stderr == ""


def test_an_interrupt_in_the_callback_of_a_weak_reference_stops_without_a_traceback():
    script = """
import os, signal, sys, time, weakref
from turnrl.plugin.signals import interrupt_on_sigterm
class Thing: pass
def dies(_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)
hook = sys.unraisablehook
try:
    with interrupt_on_sigterm() as came:
        thing = Thing()
        seen = weakref.ref(thing, dies)
        del thing
        time.sleep(5)
        print("nobody heard")
except KeyboardInterrupt:
    print("stopped by", came[0])
assert sys.unraisablehook is hook
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("stopped by 2\n", "")


@pytest.mark.parametrize("program", [["turnrl"], ["python", "-m", "turnrl"]], ids=" ".join)
def test_an_interrupt_during_command_line_import_prints_one_line(tmp_path, program):
    interrupts = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    (tmp_path / "pluggy.py").write_text(interrupts)
    command = [str(Path(sys.executable).with_name(program[0])), *program[1:], "plugins"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "\nturnrl: stopped by Ctrl-C\n")


def test_a_run_whose_reader_ends_stops_with_the_shells_exit_code(tiny_model, tmp_path, nursery):
    recipe(tiny_model, tmp_path / "run.yaml")
    process = fit(tmp_path, "--trainer.max_epochs", "50", nursery=nursery, stderr=subprocess.PIPE)
    for line in process.stdout:
        if "evaluating" in line:
            break
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert "the program that read the output, such as head, has ended" in said
    assert "--ckpt_path runs/run/version_0/checkpoints/last.ckpt" in said
    assert "Traceback" not in said
    assert "Exception ignored" not in said


def test_an_error_that_nobody_reads_keeps_its_exit_code(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stderr", stream)
    assert cli._report(RecipeError("nobody reads this")) == RecipeError.exit_code
    with contextlib.suppress(BrokenPipeError):
        stream.close()
