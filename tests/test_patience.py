"""Waiting for a server that is away: real servers that refuse, hang, die and come back."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import http.server
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from turnrl import RecipeError
from turnrl.plugin.cache import Cache
from turnrl.plugin.errors import EngineError, RewardError
from turnrl.plugin.patience import (
    LONGEST_PAUSE_S,
    Patience,
    Unavailable,
    is_loopback,
    raise_if_unavailable,
    retry_pause_s,
    short_reason,
)


class Server(http.server.ThreadingHTTPServer):
    """Answers on a port of its own: `replies` are used up first, then everything is a 200."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port=0):
        self.replies, self.asked_s = [], []
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                owner.asked_s.append(time.monotonic())
                status, headers = owner.replies.pop(0) if owner.replies else (200, {})
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(self.path.encode())

            def log_message(self, *args):
                pass

        super().__init__(("127.0.0.1", port), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.shutdown()
        self.server_close()


@pytest.fixture
def serve():
    """Starts servers, and closes them."""
    with contextlib.ExitStack() as stack:

        def start(port=0):
            server = Server(port)
            stack.callback(server.close)
            return server

        yield start


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def patient(patience_s=30.0, **options):
    return Patience(
        "the oracle", patience_s, lambda problem: EngineError(f"it {problem} Go."), **options
    )


def get(port, path="/"):
    """One attempt to ask a server."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=0.5)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        if reply.status == 503:
            raise Unavailable("status 503", reply.headers.get("retry-after"))
        if reply.status != 200:
            raise RecipeError(f"status {reply.status}")
        return reply.read().decode()
    except OSError as error:
        raise Unavailable(type(error).__name__) from None
    finally:
        connection.close()


async def get_async(port, path="/"):
    return await asyncio.to_thread(get, port, path)


@pytest.mark.parametrize("status", [408, 429, 500])
def test_a_status_that_may_change_is_raised_with_the_time_to_wait(status):
    with pytest.raises(Unavailable, match="status so") as raised:
        raise_if_unavailable(status, "status so", {"retry-after": "7"})
    assert raised.value.retry_after_s == 7


@pytest.mark.parametrize("status", [200, 404])
def test_a_status_that_stays_is_raised_by_nobody(status):
    raise_if_unavailable(status, "status so", {"retry-after": "7"})


def test_a_servers_answer_is_shortened_to_one_line_without_secrets():
    answer = "no\n  key  abcd,\tnor ab" + "!" * 400
    assert (
        short_reason(answer, ("ab", None, "", "abcd")) == ("no key ***, nor ***" + "!" * 400)[:300]
    )
    assert short_reason(ValueError("a\nb")) == "a b"
    assert short_reason(ValueError()) == "ValueError"


def test_a_fault_that_passes_within_the_retries_is_not_worth_a_line(serve, capsys):
    server = serve()
    server.replies = [(503, {})] * 2
    assert patient(retries=2).ask(lambda: get(server.server_port)) == "/"
    first, second, third = server.asked_s
    # half to all of 0.25 s, then of 0.5 s, and a tenth until it is seen
    assert 0.125 <= second - first < 0.8
    assert 0.25 <= third - second < 1.2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        (None, 0),
        ("7", 7),
        ("86400", LONGEST_PAUSE_S),
        ("soon", 0),
        ("Fri, 31 Dec 1999 23:59:59 -0000", 0),  # a date without a time zone
        ("Fri, 31 Dec 9998 23:59:59 GMT", LONGEST_PAUSE_S),
    ],
)
def test_a_retry_after_is_seconds_or_a_date_and_a_minute_at_most(header, wanted):
    assert Unavailable("busy", header).retry_after_s == wanted


def test_pauses_double_up_to_eight_seconds_and_never_fall_below_the_servers_wish():
    for failures, most in ((1, 0.25), (2, 0.5), (5, 4), (6, 8), (5000, 8)):
        pauses = [retry_pause_s(failures, Unavailable("busy")) for _ in range(200)]
        assert most / 2 <= min(pauses) < max(pauses) <= most
    assert retry_pause_s(1, Unavailable("busy", "20")) == 20


def test_an_outage_is_printed_once_when_it_begins_and_once_when_it_ends(serve, capsys):
    port, oracle = closed_port(), patient()
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(oracle.ask, lambda n=n: get(port, f"/{n}")) for n in range(8)]
        time.sleep(1.5)
        assert not any(call.done() for call in calls)
        serve(port)
        assert [call.result(10) for call in calls] == [f"/{n}" for n in range(8)]
    went, came = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"turnrl: the oracle does not answer \(ConnectionRefusedError\); the run waits for it, "
        r"30 s at most",
        went,
    )
    # 1.5 s and up to 2 s to the next attempt
    assert re.fullmatch(r"turnrl: the oracle answers again after [1-4] s; the run continues", came)


def test_while_a_server_is_down_only_one_request_at_a_time_is_sent(serve):
    server, oracle = serve(), patient()
    server.replies = [(503, {})] * 1000

    async def work():
        asked = (oracle.ask_async(lambda: get_async(server.server_port)) for _ in range(12))
        together = asyncio.gather(*asked)
        await asyncio.sleep(1.3)
        before = len(server.asked_s)
        server.replies.clear()
        await together
        return before

    # twelve at once, then one after 0.25 and one after 0.75 s: 1.75 s is too late
    assert 13 <= asyncio.run(work()) <= 12 + 2
    # and the first answer lets all others go
    assert server.asked_s[-1] - server.asked_s[-11] < 1


def test_a_long_outage_fails_all_waiting_requests_and_later_ones_start_afresh(serve):
    port, oracle, place = closed_port(), patient(1.0), threading.Semaphore(2)

    def ask():
        request = oracle.request()
        with place:  # six of the eight wait here
            return request.ask(lambda: get(port))

    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        for call in [pool.submit(ask) for _ in range(8)]:
            with pytest.raises(
                EngineError, match=r"^it does not answer \(Conn.*\)\. turnrl waited"
            ):
                call.result()
    assert 1 <= time.monotonic() - began < 2.5
    serve(port)
    assert ask() == "/"


def test_without_patience_the_first_outage_ends_the_request():
    port, began = closed_port(), time.monotonic()
    with pytest.raises(
        EngineError, match=r"^it does not answer \(ConnectionRefusedError\)\. Go\.$"
    ):
        patient(0.0).ask(lambda: get(port))
    with pytest.raises(EngineError, match="does not answer"):
        asyncio.run(patient(0.0).ask_async(lambda: get_async(port)))
    assert time.monotonic() - began < 1


def test_a_server_that_answers_others_is_not_away(serve):
    server, oracle, began = serve(), patient(0.4), time.monotonic()

    def poison():
        get(server.server_port)
        if time.monotonic() - began < 1:
            raise Unavailable("status 500")

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(oracle.ask, poison)
        while not slow.done():
            oracle.ask(lambda: get(server.server_port))
            time.sleep(0.02)
        slow.result()
    assert 1 <= time.monotonic() - began < 6  # its own pauses grow meanwhile


def test_a_cancelled_task_stops_to_wait_at_once():
    async def work():
        task = asyncio.create_task(patient().ask_async(lambda: get_async(port)))
        await asyncio.sleep(0.5)
        task.cancel()
        began = time.monotonic()
        await asyncio.wait([task])
        return task.cancelled(), time.monotonic() - began

    port = closed_port()
    cancelled, took_s = asyncio.run(work())
    assert cancelled
    assert took_s < 0.5


WAITING = """
from turnrl import ToolError
from turnrl.plugin.patience import Patience, Unavailable

def attempt():
    print("asked", flush=True)
    raise Unavailable("busy", "60")

Patience("it", 300, ToolError).ask(attempt)
"""


def test_the_example_of_the_page_waits(serve, capsys):
    page = Path(__file__).parents[1] / "docs" / "howto" / "plugins.md"
    (section,) = re.findall(r"^## A server\n(.*?)^## ", page.read_text(), re.DOTALL | re.MULTILINE)
    block, lines = re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)
    server, names = serve(), {}
    exec(block.replace("8000", str(server.server_port)), names)
    server.replies = [(503, {})]
    assert names["forecast"]("Oslo") == "/?place=Oslo"
    assert re.sub(r"after \d+ s", "after 42 s", capsys.readouterr().err) == lines


def test_ctrl_c_ends_the_wait_at_once():
    command, pipe = [sys.executable, "-c", WAITING], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "asked\n"
        time.sleep(0.3)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=10)[1]
        assert time.monotonic() - began < 2
    assert "KeyboardInterrupt" in err


def test_a_cache_waits_for_another_process_that_makes_the_same_file(tmp_path):
    """SQLite itself does not wait while another holds this lock."""
    file = tmp_path / "cache.sqlite"
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(0.3, lambda: other.execute("COMMIT")).start()
    cache = Cache(file, RewardError)
    cache.put({"said": ["yes", 1.5]})
    cache.close()
    assert Cache(file, RewardError).get(["said", "heard"]) == {"said": ["yes", 1.5]}
    other.close()


def test_a_cache_that_another_process_has_locked_is_never_to_be_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr("turnrl.plugin.cache._LOCKED_S", 0.1)
    file = tmp_path / "cache.sqlite"
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        locked = pytest.raises(RewardError, match="Another run is writing to it: repeat")
        with locked as refused:
            Cache(file, RewardError).get(["x"])
    assert "elete" not in str(refused.value)
    file.write_text("this is no database, and longer than the head of one" * 20)
    damaged = pytest.raises(RewardError, match="it is damaged: delete it, or set 'cache'")
    with damaged:
        Cache(file, RewardError).get(["x"])


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("http://localhost/retrieve", True),
        ("http://gpu.localhost.:1", True),
        ("ws://[::1]:7000", True),
        ("http://[::ffff:127.0.0.1]", True),
        ("http://0.0.0.0:8000", True),
        ("http://127.0.0.1.example.com", False),
        ("https://api.example.com/v1?host=localhost", False),
        ("http://10.0.0.1", False),
    ],
)
def test_an_address_of_this_machine_is_known(address, here):
    assert is_loopback(address) is here
