"""Collects, forks, and collects again; then trains in processes forked from this one, as a notebook
does. Run by test_processes.py.

This process multiplies no matrices: in a process that was forked from one that did, MKL waits now
and then for a thread that is not there, whatever runs above it."""

import faulthandler
import os
import sys

from runs import data, module, trainer
from turnrl.testing import ScriptedEngine


def collects(it):
    engine = ScriptedEngine(it.policy.tokenizer, lambda session, turn: "ab"[turn % 2])
    questions = data().iteration_questions(0, 0, 1)
    return it.rollout.play(engine, it.chat, questions, 4, (1,))


def main(model: str, folder: str) -> None:
    it = module(model)
    before = collects(it)
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(60, exit=True)
        os._exit(0 if collects(it) == before else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    faulthandler.dump_traceback_later(120, exit=True)
    run = trainer(folder, 1, devices=2, strategy="ddp_notebook", limit_val_batches=0)
    run.fit(it, data())


if __name__ == "__main__":
    main(*sys.argv[1:])
