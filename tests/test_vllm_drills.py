"""Runs with vLLM itself, in which a server or the run is killed or stopped in mid-collection.

They need an interpreter with vLLM: `TURNRL_TEST_VLLM_PYTHON=.../bin/python`, and
`pytest -m slow tests/test_vllm_drills.py -s`. A drill takes about a minute.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
import yaml

import turnrl
from nodes import free_port
from serving import VLLM_PYTHON, needs_vllm, sampled_tokens
from turnrl.runs import record

pytestmark = [
    pytest.mark.slow,
    needs_vllm,
]
FOLDER = turnrl.Policy("package://turnrl_atlas/starter").build().folder
RUN = [sys.executable, "-m", "turnrl"]
ITERATIONS, QUESTIONS, SIZE = 3, 8, 16
TIMES = int(os.environ.get("TURNRL_DRILLS", "5"))
"""How often each kind of fault is tried."""


class Served:
    """A vLLM server that nobody starts again."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / f"{self.port}.log"
        self.start()

    def start(self) -> None:
        serve = ["-m", "vllm.entrypoints.cli.main", "serve", FOLDER, "--dtype", "float32"]
        options = {
            "--port": self.port,
            "--host": "127.0.0.1",
            "--max-model-len": 512,
            "--max-lora-rank": 16,
            "--max-loras": 3,
            "--max-num-seqs": 64,
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",
        }
        words = [str(word) for pair in options.items() for word in pair]
        more = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [VLLM_PYTHON, *serve, *words, "--enable-lora", "--enforce-eager"],
                env={**os.environ, **more},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.wait()

    def wait(self) -> None:
        until = time.monotonic() + 240
        while not answers(self.url):
            assert time.monotonic() < until, self._log.read_text()[-2000:]
            time.sleep(1)

    def end(self) -> None:
        for number in (signal.SIGCONT, signal.SIGKILL):
            os.killpg(self._process.pid, number)
        self._process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def running(url: str, key: str = "") -> float:
    """Turns that a server samples at this moment."""
    asked = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(asked, timeout=5) as answer:
            text = answer.read().decode()
    except OSError:
        return 0.0
    return sum(float(n) for n in re.findall(r"^vllm:num_requests_running\S* (\S+)$", text, re.M))


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers, which are made when they are wanted, and end with the module."""
    made: list[Served] = []
    folder = tmp_path_factory.mktemp("servers")

    def want(number: int) -> list[Served]:
        while len(made) < number:
            made.append(Served(folder))
        for server in made[:number]:
            server.wait()
        return made[:number]

    yield want
    for server in made:
        server.end()


class Fit:
    """A run of the quickstart with fewer questions, as a command."""

    def __init__(self, folder: Path, /, **engine) -> None:
        self.folder = folder
        settings = {
            "model": {
                "policy": {"lora": {"r": 16, "alpha": 32}},
                "engine": {"class_path": "VLLM", "init_args": engine},
                "optimizer": {
                    "class_path": "torch.optim.AdamW",
                    "init_args": {"lr": 2e-3, "betas": [0.9, 0.99], "weight_decay": 0.0},
                },
                "group_size": SIZE,
            },
            "data": {"questions_per_iteration": QUESTIONS, "val_limit": 16},
            "record": {"per_iteration": 1000, "tokens": True},
            "trainer": {"max_epochs": ITERATIONS, "check_val_every_n_epoch": ITERATIONS},
        }
        (folder / "drill.yaml").write_text(yaml.safe_dump(settings))
        self.start()

    def start(self, *options: str) -> None:
        self.printed: list[str] = []
        self.process = subprocess.Popen(
            [*RUN, "fit", "quickstart", "drill.yaml", *options],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self.reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        with process.stdout:
            for line in process.stdout:
                self.printed.append(line)

    def until_it_collects(self, urls: list[str], after: float, key: str = "") -> None:
        """Wait until an iteration's turns are being sampled, and then a part of a second."""
        until = time.monotonic() + 240
        while "iteration   1/" not in self.text or sum(running(url, key) for url in urls) < 4:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < until, self.text
            time.sleep(0.02)
        time.sleep(after)

    @property
    def text(self) -> str:
        return "".join(self.printed)

    def ends(self) -> None:
        """It ends well, and what it trained on is whole and of the right weights."""
        code = self.process.wait(300)
        self.reader.join()
        assert code == 0, self.text
        assert "Traceback" not in self.text, self.text
        folders = sorted(self.folder.glob("runs/drill/version_*"))
        kept = [folder for folder in folders if (folder / "record").exists()]
        rows = [row for folder in kept for row in record.read(folder)]
        trained = [row for row in rows if row["split"] == "train"]
        steps = 4  # to an iteration
        for iteration in range(1, ITERATIONS + 1):
            attempts = [row for row in trained if row["iteration"] == iteration]
            assert len(attempts) == QUESTIONS * SIZE
            assert len({row["question_id"] for row in attempts}) == QUESTIONS
            assert {row["policy_version"] for row in attempts} == {steps * (iteration - 1)}
        gaps = []
        for row in trained:
            sampled = sampled_tokens(row)
            assert {version for version, *_ in sampled} == {row["policy_version"]}
            gaps += [abs(sampler - learner) for _, sampler, learner in sampled]
        assert max(gaps) < 5e-3
        print(f"\n{len(trained)} attempts, {len(gaps)} tokens, largest gap {max(gaps):.1e} nats")


class Own:
    """The server that a run has started, once it is there."""

    def __init__(self, fit: Fit) -> None:
        run = psutil.Process(fit.process.pid)
        while not (servers := [p for p in run.children(True) if "--port" in p.cmdline()]):
            assert fit.process.poll() is None, fit.text
            time.sleep(0.2)
        self._words = servers[0].cmdline()
        self.port = self.word("--port")
        self.url = f"http://127.0.0.1:{self.port}"

    def word(self, name: str) -> str:
        """A value of its command line."""
        return self._words[self._words.index(name) + 1]

    def left(self) -> list[psutil.Process]:
        """It and its keeper."""
        port = f"--port {self.port} "
        processes = psutil.process_iter(["cmdline"])
        return [p for p in processes if port in " ".join(p.info["cmdline"] or ())]

    def process(self) -> psutil.Process:
        servers: list[psutil.Process] = []
        while not servers:  # its keeper is about to start it
            servers = [p for p in self.left() if "keeper.py" not in str(p.info["cmdline"])]
        return min(servers, key=psutil.Process.create_time)  # it starts others


def moments(kind: str) -> list[float]:
    draw = random.Random(kind)
    return [round(draw.uniform(0, 3), 2) for _ in range(TIMES)]


@pytest.fixture
def shared(tmp_path):
    (tmp_path / "shared").mkdir()
    return str(tmp_path / "shared")


@pytest.mark.parametrize("after", moments("a server of its own"))
def test_the_runs_own_server_is_killed_and_the_run_resumed(tmp_path, monkeypatch, after):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    arguments = ["--enforce-eager", "--max-num-seqs", "64"]
    fit = Fit(tmp_path, python=VLLM_PYTHON, arguments=arguments)
    own = Own(fit)
    fit.until_it_collects([own.url], after, own.process().environ()["VLLM_API_KEY"])
    own.process().kill()
    assert fit.process.wait(120) == 1
    fit.reader.join()
    assert "vLLM has ended" in fit.text
    assert "Traceback" not in fit.text, fit.text
    assert own.left() == []
    fit.start("--ckpt_path", "last")
    again = Own(fit)
    fit.ends()
    assert again.left() == []


@pytest.mark.parametrize("after", moments("the learner"))
def test_the_learner_is_killed_and_resumed(tmp_path, monkeypatch, after):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    fit = Fit(tmp_path, python=VLLM_PYTHON, arguments=["--enforce-eager", "--max-num-seqs", "64"])
    own = Own(fit)
    weights = Path(own.word("--tokenizer")).parent
    fit.until_it_collects([own.url], after, own.process().environ()["VLLM_API_KEY"])
    assert weights.exists()
    fit.process.kill()
    fit.process.wait()
    fit.reader.join()
    assert psutil.wait_procs(own.left(), timeout=40)[1] == []
    assert not weights.exists()
    fit.start("--ckpt_path", "last")
    again = Own(fit)
    fit.ends()
    assert again.left() == []


@pytest.mark.parametrize("after", moments("the only server hangs"))
@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_the_only_server_is_away_for_a_while(servers, shared, tmp_path, fault, after):
    (server,) = servers(1)
    fit = Fit(tmp_path, url=server.url, folder=shared)
    fit.until_it_collects([server.url], after)
    break_and_mend([server], fault)
    fit.ends()


@pytest.mark.parametrize("after", moments("one of two"))
@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_a_run_survives_the_loss_of_one_of_two_servers(servers, shared, tmp_path, fault, after):
    both = servers(2)
    fit = Fit(tmp_path, url=[server.url for server in both], folder=shared, timeout_s=20)
    fit.until_it_collects([server.url for server in both], after)
    both[0].signal(signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    fit.ends()
    assert "its attempts begin again on another" in fit.text
    if fault == "stop":
        both[0].signal(signal.SIGCONT)
    else:
        both[0].start()


@pytest.mark.parametrize("after", moments("all of two"))
@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_all_servers_are_away_for_a_while(servers, shared, tmp_path, fault, after):
    both = servers(2)
    fit = Fit(tmp_path, url=[server.url for server in both], folder=shared)
    fit.until_it_collects([server.url for server in both], after)
    break_and_mend(both, fault)
    fit.ends()


def break_and_mend(broken: list[Served], fault: str) -> None:
    """Stop servers for 20 s, or kill them and start them again, which takes as long."""
    for server in broken:
        server.signal(signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    if fault == "stop":
        time.sleep(20)
    for server in broken:
        if fault == "stop":
            server.signal(signal.SIGCONT)
        else:
            server.start()
