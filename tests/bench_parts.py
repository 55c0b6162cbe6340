"""Parts of a benchmark that go well, break, die or hang. Light to import: each runs in a process of
its own."""

from __future__ import annotations

import os
import time

import torch


def right(bench, cases):
    cases.run("only", lambda: {"value": 1})


def breaks(bench, cases):
    cases.run("good", lambda: {"value": 1})
    raise ValueError("the part itself")


def one_case_breaks(bench, cases):
    def full():
        raise torch.OutOfMemoryError("tried to allocate 72 GB")

    cases.run("full", full)
    cases.run("good", lambda: {"value": 2})


def interrupted(bench, cases):
    raise KeyboardInterrupt


def dies(bench, cases):
    cases.run("before", lambda: {"value": 3})
    os._exit(9)


def hangs(bench, cases):
    time.sleep(1000)
