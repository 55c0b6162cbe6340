"""Collects, forks, and collects again; then trains in processes forked from this one, as a notebook
does. Run by test_processes.py."""

import faulthandler
import os
import sys

from runs import data, module, trainer
from turnrl_slots import Slots


def collects(it):
    engine = Slots()
    engine.start(it.policy, it.rollout.max_tokens)
    questions = data().iteration_questions(0, 0, 1)
    return it.rollout.play(engine, it.chat, questions, 4, (1,))


def main(model: str, folder: str) -> None:
    it = module(model)
    it.policy.load()
    before = collects(it)
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(30, exit=True)
        os._exit(0 if collects(it) == before else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    faulthandler.dump_traceback_later(60, exit=True)
    run = trainer(folder, 1, devices=2, strategy="ddp_notebook", limit_val_batches=0)
    run.fit(it, data())


if __name__ == "__main__":
    main(*sys.argv[1:])
