"""Sampling ahead: the next iterations' attempts come while this one is learned from."""

import asyncio
import itertools
import time
from dataclasses import replace

import pytest
import torch
from lightning import Callback

from runs import Ready, adamw, column, trainer
from turnrl import (
    MTGRPO,
    ClippedSurrogate,
    Policy,
    QuestionData,
    RecipeError,
    Rollout,
    Stateful,
    ToolError,
)
from turnrl.engines import EngineSettings, Session
from turnrl.runs import record
from turnrl.testing import check_engine
from turnrl.types import ToolSession
from turnrl.watch.recorder import Recorder
from turnrl_slots import Slots
from worlds import Answered, Called, Echo, Kept, Letters, Numbers


def make_module(model, staleness, tools=None, **options):
    rollout = Rollout(Letters(), tools or [Echo()], max_turn_tokens=8, max_tokens=256)
    engine = options.pop("engine", Kept(staleness + 1))
    settings = {
        "engine": engine if isinstance(engine, EngineSettings) else Ready(engine),
        "objective": ClippedSurrogate(importance_cap=2.0),
        "group_size": 4,
        "max_staleness": staleness,
        "steps_per_pass": 2,
        "optimizer": adamw(3e-3),
        **options,
    }
    return MTGRPO(Policy(str(model)), rollout, [Answered(), Called()], **settings)


def fitted(module, folder, epochs, *callbacks, **options):
    data = QuestionData(Numbers(), None, questions_per_iteration=2)
    trainer(folder, epochs, callbacks, limit_val_batches=0, **options).fit(module, data)
    return module


class Versions(Callback):
    """Notes the versions that sampled what each iteration learns from."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            (version,) = {v for t in pl_module.experience.trajectories for v in t.versions}
            self.seen.append(version)


@pytest.mark.parametrize(
    ("staleness", "versions"),
    [
        (0, [0, 2, 4, 6]),
        (1, [0, 0, 2, 4]),
        pytest.param(2, [0, 0, 0, 2], marks=pytest.mark.slow),
    ],
)
def test_training_data_is_exactly_as_stale_as_allowed(tiny_model, tmp_path, staleness, versions):
    seen = Versions()
    module = fitted(make_module(tiny_model, staleness), tmp_path, 4, seen, Recorder())
    assert seen.seen == versions
    gaps = column(tmp_path, "train/logprob_gap")
    for iteration, version in enumerate(versions):
        behind = 2 * iteration - version
        assert (gaps[iteration] > 1e-4) == (behind > 0)
        if staleness:
            assert column(tmp_path, "train/staleness")[iteration] == behind
    kept = record.read(tmp_path / "version_0", split="train")
    assert sorted({row["iteration"] for row in kept}) == [1, 2, 3, 4]  # a file for each
    assert {row["policy_version"] for row in kept} == {0, 2, 4, 6}
    assert module.engine.copies == {}  # nothing goes on: three iterations ahead were never begun


class Rests(Kept):
    """Notes its life."""

    def __init__(self):
        super().__init__(1)
        self.calls: list[str] = []

    def sync(self, version):
        self.calls.append("sync")
        super().sync(version)

    def open(self, prompt_ids):
        self.calls.append("open")
        return super().open(prompt_ids)

    def release_memory(self):
        self.calls.append("rest")


class Asks(Callback):
    """Asks the policy something when it has been sampled and not yet learned."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            pl_module.ask("what now?")


def test_an_engine_that_rests_is_synced_before_it_samples_again(tiny_model, tmp_path):
    module = fitted(make_module(tiny_model, 0, engine=Rests()), tmp_path, 2, Asks())
    calls = [name for name, _ in itertools.groupby(module.engine.calls)]
    assert calls[:3] == ["sync", "open", "rest"]
    assert calls.count("rest") == 2
    assert all(after == "sync" for n, after in enumerate(calls) if calls[n - 1 : n] == ["rest"])


def test_without_staleness_an_engine_with_its_own_weights_changes_nothing(tiny_model, tmp_path):
    ends = []
    for name, engine in (("slots", Slots().build()), ("kept", Kept())):
        module = fitted(make_module(tiny_model, 0, engine=engine), tmp_path / name, 2)
        ends.append(torch.cat([p.detach().flatten() for p in module.policy.parameters()]))
    assert torch.equal(*ends)


class Ahead(Stateful, Echo):
    """Does something of its own on calls of the second collection, and those after it.

    Args:
        first: Attempts of the first collection.
    """

    timeout_s = 600.0

    def __init__(self, first: int = 8) -> None:
        self.first, self.opened = first, 0

    async def open(self, question):
        session, self.opened = ToolSession(), self.opened + 1
        session.ahead = self.opened > self.first
        return session

    async def run(self, calls):
        if any(call.session.ahead for call in calls):
            await self.meet()
        return super().run(calls)


class Late(Ahead):
    """Waits until something was learned."""

    learned = False

    async def meet(self):
        for _ in range(600):
            if self.learned:
                return
            await asyncio.sleep(0.1)
        raise TimeoutError("nothing was learned in the meantime")


@pytest.mark.timeout(120)
def test_the_next_iteration_is_sampled_while_the_current_one_trains(tiny_model, tmp_path):
    tool = Late()

    class Learned(Callback):
        def on_train_batch_end(self, *_):
            tool.learned = True

    module = fitted(make_module(tiny_model, 1, [tool]), tmp_path, 2, Learned())
    assert (module.global_step, tool.opened) == (4, 16)


class Down(Ahead):
    async def meet(self):
        raise ConnectionError("no route")


def test_a_world_failing_ahead_stops_the_run_after_the_iteration_already_sampled(
    tiny_model, tmp_path
):
    module = make_module(tiny_model, 1, [Down()])
    with pytest.raises(ToolError, match="no route"):
        fitted(module, tmp_path, 3)
    assert module.global_step == 2


class Hangs(Ahead):
    hung = False

    async def meet(self):
        self.hung = True
        await asyncio.sleep(500)


@pytest.mark.timeout(120)
def test_sampling_ahead_stops_when_the_run_ends(tiny_model, tmp_path):
    tool = Hangs()

    class Stop(Callback):
        def on_train_batch_end(self, trainer, *_):
            while not tool.hung:
                time.sleep(0.05)
            trainer.should_stop = True

    module = fitted(make_module(tiny_model, 1, [tool], steps_per_pass=1), tmp_path, 5, Stop())
    assert module.global_step == 1
    assert module.collector.in_progress == 0


def test_collections_side_by_side_share_the_places_of_a_toolset(tiny_model, tmp_path):
    class Booth(Ahead):
        capacity, now, most = 4, 0, 0

        async def open(self, question):
            self.now += 1
            self.most = max(self.most, self.now)
            booth, session = self, await super().open(question)

            class Visit(type(session)):
                ahead = session.ahead

                def close(self):
                    booth.now -= 1

            return Visit()

        async def meet(self):
            await asyncio.sleep(0.01)

    tool = Booth()
    fitted(make_module(tiny_model, 1, [tool]), tmp_path, 3)
    assert (tool.opened, tool.now, tool.most) == (24, 0, 4)


def test_sampling_ahead_stops_when_training_raises(tiny_model, tmp_path):
    class Fails(Callback):
        def on_train_batch_end(self, *_):
            raise ZeroDivisionError

    tool = Hangs()
    module = make_module(tiny_model, 1, [tool])
    with pytest.raises(ZeroDivisionError):
        fitted(module, tmp_path, 3, Fails())
    assert module.collector.in_progress == 0
    assert module.engine.copies == {}  # Lightning tears nothing down after an exception


def test_a_validation_inside_an_iteration_would_take_a_version(tiny_model, tmp_path):
    data = QuestionData(Numbers(), Numbers(), questions_per_iteration=2)
    with pytest.raises(RecipeError, match=r"val_check_interval is 0\.5: a validation inside"):
        trainer(tmp_path, 2, val_check_interval=0.5).fit(make_module(tiny_model, 1), data)


@pytest.mark.parametrize(
    "options",
    [
        {"engine": Slots()},
        {"engine": Kept(1)},
        {"max_staleness": 3},
        {"objective": ClippedSurrogate()},
        {"objective": ClippedSurrogate(importance_cap=False)},
    ],
)
def test_staleness_needs_copies_and_a_correction(tiny_model, tmp_path, options):
    module = make_module(tiny_model, 1, **options)
    with pytest.raises(RecipeError, match=r"max_staleness is \d"):
        fitted(module, tmp_path, 1)
    if "engine" in options:  # a policy that only acts needs neither
        module.collector.close()
        trainer(tmp_path, 1).validate(module, QuestionData(Numbers(), Numbers()), verbose=False)


def test_an_engine_that_keeps_versions_keeps_the_contract(tiny_policy):
    check_engine(Kept(), tiny_policy)

    class Forgets(Kept):
        """Says another version than that of its weights."""

        def open(self, prompt_ids):
            return Old(super().open(prompt_ids), 1 if len(self.copies) > 1 else 7)

    with pytest.raises(AssertionError, match="gives version 7 in a session from before sync"):
        check_engine(Forgets(), tiny_policy)


class Old(Session):
    def __init__(self, session, version):
        self._session, self._version = session, version

    async def generate(self, new_ids, sampling):
        done = await self._session.generate(new_ids, sampling)
        return replace(done, version=self._version)

    def fork(self):
        return Old(self._session.fork(), self._version)

    def close(self):
        self._session.close()
