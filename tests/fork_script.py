"""Collects, forks, and collects again; then trains in processes forked from this one, as a notebook
does. Run by test_processes.py.

This process multiplies no matrices: in a process that was forked from one that did, MKL waits now
and then for a thread that is not there, whatever runs above it."""

import faulthandler
import os
import sys

from runs import data, make_module, trainer
from turnrl.testing import ScriptedEngine


def collects(module):
    engine = ScriptedEngine(module.policy.tokenizer, lambda session, turn: "ab"[turn % 2])
    questions = data().iteration_questions(0, 0, 1)
    return module.rollout.play(engine, module.chat, questions, 4, (1,))


def main(model: str, folder: str) -> None:
    module = make_module(model)
    before = collects(module)
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(60, exit=True)
        os._exit(0 if collects(module) == before else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    faulthandler.dump_traceback_later(120, exit=True)
    run = trainer(folder, 1, devices=2, strategy="ddp_notebook", limit_val_batches=0)
    run.fit(module, data())


if __name__ == "__main__":
    main(*sys.argv[1:])
