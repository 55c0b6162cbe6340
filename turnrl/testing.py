"""Checks that a plugin keeps its contracts, as functions to call in its tests.

    def test_my_tool_keeps_to_the_contract():
        check_tool(MyTool(), good_calls=[{"query": "Utrecht"}], bad_calls=[{"query": ""}])

Each raises an `AssertionError` that says what is broken and with what input. They need no test
framework, and but for `check_engine`, which samples a policy, no model; but for that and
`check_estimator`, whose matter is tensors, no torch either.

`ScriptedEngine` plays given texts, to try a segmenter, a tool or a reward in a whole rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from turnrl import types
from turnrl.answers import usable_answers
from turnrl.errors import DataError
from turnrl.text import neutralise
from turnrl.toolbox import Bench, Toolbox, check_tools

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

_Calls = Sequence[Mapping[str, Any]]  # the arguments of each


class _Breach(AssertionError):
    """Error that `_require` raises, so that it can be told from an assertion of the plugin's
    own."""


def _require(condition: object, message: str) -> None:
    # not `assert`, which `python -O` leaves out and pytest rewrites in test modules only
    if not condition:
        raise _Breach(message)


@contextlib.contextmanager
def _on(what: str) -> Iterator[None]:
    """Whatever goes wrong inside, in the plugin's own code or with what it gave, is told as a
    sentence of which `what` is the beginning: whose method, with which example."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raised = "" if isinstance(error, _Breach) else f"raised {type(error).__name__}: "
        raise _Breach(f"{what} {raised}{error}") from error


# -------------------------------------------------------------------------------------------- tools


def check_tool(tool: types.Tool, good_calls: _Calls, bad_calls: _Calls = ()) -> None:
    """Check a tool: its description, its preflight check, its sessions, its replies, and that
    `open`, `run` and `close` take no longer than `timeout_s`.

    Each call has a session of its own, if the tool opens them; each is closed, whatever happens.
    As in a rollout, plain methods run in threads, and coroutines on one event loop.

    Args:
        tool: The tool, with whatever it needs at hand.
        good_calls: Arguments of calls that must succeed.
        bad_calls: Arguments that are the policy's mistake: the schema rejects them, or the result
            is not `ok` and says why.
    """
    name, limit = type(tool).__name__, tool.timeout_s
    _require(good_calls, f"give check_tool a good call of {name}")
    named = isinstance(tool.name, str) and re.fullmatch(r"\w[\w.-]*", tool.name)
    _require(named, f"{name}.name is {tool.name!r}: use letters, digits, _, - and .")
    _require(tool.description.strip(), f"{name}.description is empty")
    timed = isinstance(limit, int | float) and 0 < limit < math.inf
    _require(timed, f"{name}.timeout_s is {limit!r}: give a number of seconds")
    with _on(f"{name}.parameters"):
        described = tool.parameters.get("type") == "object"
        _require(described, f"must be the JSON Schema of an object, not {tool.parameters!r}")
        check_tools([tool])
    with _on(f"{name}.check()"):
        tool.check()

    alone = [_replies(tool, [arguments])[0] for arguments in good_calls]
    together = _replies(tool, good_calls)
    for arguments, one, same in zip(good_calls, alone, together, strict=True):
        told = f"{name}.run on the good call {arguments!r} gives {one!r}"
        _require(one.ok and one.content, f"{told}, which is no success with a text")
        ordered = one.content == same.content
        _require(ordered, f"{told}, and in a batch {same!r}: keep the order of the calls")
    for arguments in bad_calls:
        (one,) = _replies(tool, [arguments])
        told = f"{name}.run on the bad call {arguments!r} gives {one!r}"
        _require(not one.ok and one.content, f"{told}, which is no failure with a reason")


def _replies(tool: types.Tool, some: _Calls) -> list[types.ToolResult]:
    """Replies to calls that meet in a rollout, each of a trajectory of its own."""

    async def play() -> list[types.ToolResult]:
        box = Toolbox([tool], str, 1)
        benches = [box.bench(_QUESTION) for _ in some]
        calls = ([types.ToolCall(tool.name, arguments)] for arguments in some)
        try:
            answers = map(Bench.answer, benches, calls)
            found = [result for (result,) in await asyncio.gather(*answers)]
        finally:
            closed = await asyncio.gather(*map(Bench.close, benches), return_exceptions=True)
        for error in filter(None, closed):
            raise error
        return found

    # what hangs cannot be ended, only left: so the event loop runs in a daemon thread
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop, end = runner.get_loop(), asyncio.Event()

    def serve() -> None:
        with runner:
            runner.run(end.wait())

    threading.Thread(target=serve, daemon=True).start()
    found = asyncio.run_coroutine_threadsafe(play(), loop)
    with _on(f"a rollout with {type(tool).__name__}"), contextlib.ExitStack() as last:
        last.callback(loop.call_soon_threadsafe, end.set)
        while not wait([found], tool.timeout_s).done:
            alive = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
            held = f"stands still on {[*some]!r}: a coroutine of the tool's blocks the event loop"
            _require(wait([alive], 1).done, held)
        return found.result()


# --------------------------------------------------------------------------------------- segmenters


def check_segmenter(segmenter: types.Segmenter, texts: int = 2000) -> None:
    """Check a segmenter: its prompt, that it reads any text, and that it shows results as they are.

    Args:
        segmenter: The segmenter.
        texts: How many random texts to read.
    """
    name = type(segmenter).__name__
    _require(segmenter.max_turns >= 1, f"{name}.max_turns is {segmenter.max_turns}")
    for values in (segmenter.stop, segmenter.tags):
        fits = isinstance(values, tuple) and all(isinstance(v, str) and v for v in values)
        _require(fits, f"{name}.stop and {name}.tags must be tuples of texts, not {values!r}")
    for stop in segmenter.stop:
        tag = re.fullmatch(r"</?(\w+)>", stop)
        told = f"{name} stops at {stop!r}, so {tag and tag[1]!r} must be in its tags"
        _require(not tag or tag[1] in segmenter.tags, f"{told}: else a result could contain it")
    for tools in ([], [_Echo()]):
        with _on(f"{name}.prompt({_QUESTION!r}, {tools!r})"):
            messages = segmenter.prompt(_QUESTION, tools)
            shown = _shown(messages, "system", "user", "assistant")
            _require(messages[-1]["role"] == "user", "must end with the user's message")
            _require(_QUESTION.text in shown, f"leaves the question out: {messages!r}")
    for text, turn in itertools.product(_soups(segmenter, texts), {0, segmenter.max_turns - 1}):
        with _on(f"{name}.read({text!r}, {turn}, cut=False)"):
            reading, again = (segmenter.read(text, turn, False) for _ in range(2))
            gave = f"gives {reading!r}"
            _require(isinstance(reading, types.Reading), f"{gave}, which is no Reading")
            _require(reading == again, f"{gave}, and the second time {again!r}")
            _require(isinstance(reading.answer, str | None), f"{gave}: answer is no text")
            for call in reading.calls:
                _require(isinstance(call, types.ToolCall), f"{gave}: {call!r} is no ToolCall")
                _require(isinstance(call.arguments, Mapping), f"{gave}: arguments are no mapping")
                _require(call.name or call.error, f"{gave}: a call has neither name nor error")
                owned = call.mended is None or reading.format_error is not None
                _require(owned, f"{gave}: a turn with a mended call needs a format_error")
            acts = reading.calls or reading.answer is not None or reading.format_error
            _require(acts, f"{gave}: a turn that neither calls nor answers needs a format_error")
        part = text[: len(text) * 2 // 3]
        with _on(f"{name}.read({part!r}, {turn}, cut=True)"):
            answer = segmenter.read(part, turn, True).answer
            told = f"takes the answer {answer!r} from what was cut: the whole, {text!r}, answers"
            _require(answer in (None, reading.answer), f"{told} {reading.answer!r}")
        content = neutralise(text, segmenter.tags, [])
        results = [types.ToolResult(content, n % 2 == 0) for n, _ in enumerate(reading.calls)]
        with _on(f"{name}.observe({reading!r}, {results!r})"):
            shown = _shown(segmenter.observe(reading, results), "user", "tool")
            whole = shown.count(content) >= len(results) or not content
            _require(whole, f"must show each result as it is, not as {shown!r}")
    reading = segmenter.read("Lorem ipsum dolor sit amet.", 0, False)
    formless = reading.answer is None or reading.format_error is not None or not segmenter.tags
    _require(formless, f"{name} takes plain text for a well-formed turn: {reading!r}")


def _shown(messages: Sequence[Mapping[str, str]], *roles: str) -> str:
    """The contents of chat messages, which have these roles."""
    told = f"must give messages of role {' or '.join(roles)} with a text, not {messages!r}"
    _require(isinstance(messages, list) and messages, told)
    for message in messages:
        _require({*message} == {"role", "content"} and message["role"] in roles, told)
        _require(isinstance(message["content"], str) and message["content"], told)
    return "\n".join(message["content"] for message in messages)


def _soups(segmenter: types.Segmenter, count: int) -> Iterator[str]:
    """Texts that a policy might write: nothing, tag soups, broken JSON, any unicode, very long."""
    tags = [f"<{slash}{tag}>" for tag in segmenter.tags for slash in ("", "/")]
    call = '{"name": "echo", "args": {"text": "x"}}'
    pieces = [*tags, *segmenter.stop, call, call[:-1], *'{["\n a', "null", "\\ud800"]
    long = ("[" * 50_000, "<" * 10_000, "🙂" * 100)
    yield from ("", "\x00", "\u202e\u0000\ufffd", *long, *pieces)
    draw = random.Random(0)
    for _ in range(count):
        soup = draw.choices(pieces, k=draw.randrange(1, 12))
        noise = (chr(draw.choice((draw.randrange(128), draw.randrange(0xD7FF)))) for _ in range(5))
        soup.insert(draw.randrange(len(soup) + 1), "".join(noise) if draw.random() < 0.3 else "")
        yield "".join(soup)


class _Echo(types.Tool):
    """Repeats a text."""

    name, description = "echo", "Repeat a text."
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}

    def run(self, calls: Sequence[types.ToolCall]) -> Sequence[types.ToolResult]:
        return [types.ToolResult(str(call.arguments["text"])) for call in calls]


# ------------------------------------------------------------------------------------------ rewards


def check_reward(
    reward: types.Reward,
    trajectories: Mapping[str, types.Trajectory] | None = None,
    policy: types.SampledPolicy | None = None,
) -> None:
    """Check a reward: finite numbers, the same each time, and nothing to gain by garbage.

    Args:
        reward: A turn reward or an outcome reward.
        trajectories: What to score, by name; `example_trajectories` by default. Those whose name
            begins with `garbage` may earn nothing, unless every other one earns as much.
        policy: For a reward that asks one in `prepare`.
    """
    name = type(reward).__name__
    of_turns = isinstance(reward, types.TurnReward)
    one_kind = of_turns != isinstance(reward, types.OutcomeReward)
    _require(one_kind, f"{name} must extend either TurnReward or OutcomeReward")
    named = re.fullmatch(r"[a-z0-9_]*", reward.name)
    _require(named, f"{name}.name is {reward.name!r}: use lower case, digits and _, as in metrics")
    score: Callable[..., float] = cast(Any, reward).score
    totals: dict[str, float] = {}
    attempts = trajectories or example_trajectories()
    with _on(f"{name}.prepare on {len(attempts)} trajectories"):
        reward.prepare([*attempts.values()], policy)
    for label, trajectory in attempts.items():
        # turn by turn, or once
        for at in itertools.product(range(len(trajectory.turns)), repeat=int(of_turns)):
            with _on(f"{name}.score({', '.join(map(repr, (label, *at)))})"):
                first, again = score(trajectory, *at), score(trajectory, *at)
                finite = isinstance(first, int | float) and math.isfinite(first)
                _require(finite, f"gives {first!r}, which is not a finite number")
                _require(first == again, f"gives {first!r}, and the second time {again!r}")
                totals[label] = totals.get(label, 0.0) + first
    least = max(0.0, min(totals.values()))
    paid = {k: total for k, total in totals.items() if k.startswith("garbage") and total > least}
    _require(not paid, f"{name} pays for garbage, which may earn nothing: {paid}")


_Step = tuple[types.Reading, tuple[types.ToolResult, ...]]

_QUESTION = types.Question("q", "What is the time zone of Utrecht?", ("Europe/Amsterdam", "CET"))


def _searched(*results: types.ToolResult) -> _Step:
    """A turn of searches that have these results."""
    call = types.ToolCall("search", {"query": "Utrecht"})
    return types.Reading((call,) * len(results)), results


_PAGE = types.ToolResult("Utrecht is in the time zone Europe/Amsterdam.")
_SEARCHED = _searched(_PAGE)
_RIGHT: _Step = (types.Reading(answer="Europe/Amsterdam"), ())


def _attempt(*steps: _Step, text: str = "text", of: types.Question = _QUESTION) -> types.Trajectory:
    turns = tuple(
        types.Turn(text, (7, 8, 9), (-0.1,) * 3, *step, (5,) if step[1] else ()) for step in steps
    )
    answered = turns[-1].reading.answer is not None
    return types.Trajectory(of, (1, 2, 3), turns, "answer" if answered else "turns")


def example_trajectories() -> dict[str, types.Trajectory]:
    """Attempts at one question, by name: good ones, failed ones, and garbage."""
    garbled: _Step = (types.Reading(format_error="no tool call or answer"), ())
    empty: _Step = (types.Reading(answer="", format_error="the answer is empty"), ())
    unreadable = types.Reading((types.ToolCall("", error="bad JSON"),), None, "bad JSON")
    no_tool = types.ToolResult("no such tool", ok=False)
    unanswerable = types.Question("q", "What?", ("", "the"))
    return {
        "right after a search": _attempt(_SEARCHED, _RIGHT),
        "right without a search": _attempt(_RIGHT),
        "wrong after a search": _attempt(_SEARCHED, (types.Reading(answer="Asia/Tokyo"), ())),
        "answer among others": _attempt(_SEARCHED, (types.Reading(answer="CET or Asia/Tokyo"), ())),
        "nothing found": _attempt(_searched(types.ToolResult("no results")), _RIGHT),
        "failed call": _attempt(_searched(no_tool), _RIGHT),
        "unreadable call": _attempt((unreadable, (types.ToolResult("bad JSON", False),)), _RIGHT),
        "two calls, one failed": _attempt(_searched(_PAGE, no_tool), _RIGHT),
        "no accepted answers": _attempt(_SEARCHED, _RIGHT, of=types.Question("q", "What?")),
        "garbage": _attempt(garbled, garbled),
        "garbage that names the answer": _attempt(garbled, garbled, text="Europe/Amsterdam"),
        "garbage of one turn": _attempt(garbled),
        "garbage with an empty answer": _attempt(empty, of=unanswerable),
    }


# --------------------------------------------------------------------------------------- estimators


def check_estimator(estimator: types.AdvantageEstimator) -> None:
    """Check an estimator on drawn groups of `min_group_size` trajectories and more: finite
    advantages of the right shape, zero for a turn that was not taken, each with its trajectory
    whatever the order of the group; and that it is a pure function.

    That it should heed any reward, or not heed a constant, is not asked.

    Args:
        estimator: The estimator.
    """
    name, least = type(estimator).__name__, estimator.min_group_size
    _require(isinstance(least, int) and least >= 1, f"{name}.min_group_size is {least!r}")
    draw = random.Random(0)
    for size, turns in itertools.product((least, least + 1, least + 6), (1, 2, 4)):
        for drawn in _drawn(draw, size, turns):
            order = draw.sample(range(size), size)
            told = "turns taken {}, outcome and turn rewards {}".format(*drawn)
            with _on(f"{name} on a group of shape {(size, turns)} ({told})"):
                orders, tree = (range(size), range(size), order), estimator.trains_probes
                keys, _, moved_keys = (_members(drawn, members, tree) for members in orders)
                group, same, other = (_group(drawn, members, tree) for members in orders)
                found = estimator(group)
                shapes = [tuple(row.shape) for row in found]
                tokens = [(sum(k >= 0 for k in a.turn_index),) for a in group.trajectories]
                by_tokens = isinstance(found, tuple)
                fits = shapes == (tokens if by_tokens else [(turns,)] * len(tokens))
                fits = fits and all(row.is_floating_point() for row in found)
                told = "which is no float tensor of that shape, nor a tuple with one for each token"
                _require(fits, f"gives {found!r}, {told}")
                first = _table(found)
                gave = f"gives {first.tolist()}"
                _require(first.isfinite().all(), f"{gave}, which is not finite")
                idle = not by_tokens and first[~group.reached].any()
                _require(not idle, f"{gave}, not zero where not reached")
                for name_of in ("turn_rewards", "outcome", "reached"):
                    untouched = getattr(group, name_of).equal(getattr(same, name_of))
                    _require(untouched, f"changes {name_of} of the group")
                again = _table(estimator(group))
                _require(first.equal(again), f"{gave}, and the second time {again.tolist()}")
                moved, nearly = _table(estimator(other)), 1e-3 * max(1.0, float(first.abs().max()))
                places = [keys.index(key) for key in moved_keys]
                fair = moved.allclose(first[places], rtol=0, atol=nearly)
                _require(fair, f"{gave}, and {moved.tolist()} to its members in the order {order}")


def _table(credit: Tensor | tuple[Tensor, ...]) -> Tensor:
    """A row of numbers for each trajectory, with zeros where others have more."""
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence([row.clone() for row in credit], batch_first=True)


_Drawn = tuple[list[int], list[list[float]]]


def _drawn(draw: random.Random, size: int, turns: int) -> Iterator[_Drawn]:
    """Groups of every kind: the turns that each takes; the outcome and the turn rewards of each."""
    some = [draw.randint(1, turns) for _ in range(size)]
    lengths = ([turns] * size, some, [turns, *[1] * (size - 1)], [1] * size)
    # powers of two, of which sums are exact, so that what is equal stays equal
    for unit, taken in itertools.product((2.0**-3, 2.0**17, 2.0**-23), lengths):
        yield taken, [[draw.randint(-8, 16) * unit for _ in range(turns + 1)] for _ in taken]
    for apart, taken in itertools.product((0.5, 1.5), lengths):
        yield taken, [[0.5 if i else apart] * (turns + 1) for i in range(size)]


def _members(drawn: _Drawn, order: Sequence[int], tree: bool) -> list[tuple[int, int, int]]:
    """Of each member of a group which trajectory it is, which one it branched off, and at which
    turn: at the beginning of each turn the next one that takes that turn does, in a tree."""
    taken, size = drawn[0], len(order)
    members = [(m, m, -1) for m in order]
    for trunk, k in [(m, k) for m in order for k in range(taken[m] * tree)]:
        others = (m % size for m in range(trunk + 1, trunk + 1 + size))
        members.append((next(m for m in others if taken[m] > k), trunk, k))
    return members


def _group(drawn: _Drawn, order: Sequence[int], tree: bool) -> types.Group:
    """The group of what was drawn, its members in an order."""
    import torch

    members = _members(drawn, order, tree)
    taken, rewards = (torch.tensor(of_all)[[m for m, _, _ in members]] for of_all in drawn)
    begins = torch.tensor([max(k, 0) for _, _, k in members])
    turn = torch.arange(rewards.shape[1] - 1)
    rewards[:, 1:] *= turn < taken[:, None]
    reached = (turn < taken[:, None]) & (turn >= begins[:, None])
    steps = [[*[_SEARCHED] * (n - 1), _RIGHT] for n in drawn[0]]
    attempts = tuple(
        replace(_attempt(*steps[m], text=f"attempt {m}"), begins=max(k, 0)) for m, _, k in members
    )
    parts = tuple({"outcome/a": end, "turn/b": sum(row)} for end, *row in rewards.tolist())
    values = rewards[:, 1:].flip(1) * reached
    own = [sum(k >= 0 for k in attempt.turn_index) for attempt in attempts]
    of_tokens = tuple(row[0] * torch.arange(n) for row, n in zip(values, own, strict=True))
    group = types.Group(_QUESTION, attempts, rewards[:, 1:], rewards[:, 0], reached, parts)
    parents = tuple([*order].index(trunk) for _, trunk, _ in members)
    return replace(group, state_values=values, token_values=of_tokens, parents=parents)


# ------------------------------------------------------------------------------------------ sources


def check_source(source: types.QuestionSource) -> None:
    """Check a source: that it has the questions that it says it has, the same ones each time, knows
    which splits it has, and has a corpus or says that it has none.

    The questions of its default splits are all read, twice; of the corpus, which may be larger than
    memory, the first 3,000 passages. Whether splits share questions is the source's business.

    Args:
        source: The source.
    """
    name, splits, uses = type(source).__name__, source.default_splits, source.uses
    fits = isinstance(uses, tuple) and {*uses} <= {"fields", "config"}
    _require(fits, f"{name}.uses is {uses!r}: give a tuple that may hold 'fields' and 'config'")
    known = [*dict.fromkeys(split for split in splits.values() if split is not None)]
    fits = {*splits} == {"train", "val"} and all(isinstance(split, str) for split in known)
    told = f"{name}.default_splits is {splits!r}: name one for 'train' and for 'val', or None"
    _require(fits and known, told)
    for split in known:
        with _on(f"{name}.questions({split!r})"):
            found = list(source.questions(split))
            _check_texts(found, types.Question)
            usable = any(map(usable_answers, found))
            _require(usable, f"gives {found[0]!r}, and none that has an answer to match")
            for pair in itertools.zip_longest(found, source.questions(split)):
                first, again = (q and (q.id, q.text, q.answers) for q in pair)
                _require(first == again, f"gives {first}, and the second time {again}")
    with _on(f"{name}.questions('no-such-split')"):
        try:
            _require(False, f"gives {len([*source.questions('no-such-split')])}, and no DataError")
        except DataError as error:
            listed = all(split in str(error) for split in known)
            _require(listed, f"raises {error!r}, which does not list the splits there are: {known}")
    with _on(f"{name}.passages()"), contextlib.suppress(DataError):
        _check_texts(list(itertools.islice(source.passages(), 3000)), types.Passage)


def _check_texts(found: Sequence[Any], kind: type) -> None:
    """That there are questions or passages, each with a text and an id of its own."""
    _require(found, "gives nothing")
    seen: dict[str, Any] = {}
    for one in found:
        told = f"gives {one!r}: a {kind.__name__} has an id and a text"
        _require(isinstance(one, kind), told)
        texts = (one.id, one.text)
        _require(all(isinstance(text, str) and text.strip() for text in texts), told)
        _require(one.id not in seen, f"gives one id to {seen.get(one.id)!r} and to {one!r}")
        seen[one.id] = one


# ------------------------------------------------------------------------------------------ engines


def check_engine(
    engine: types.Engine, policy: types.SampledPolicy, temperature: float = 1.0
) -> None:
    """Check an engine on a policy: exact appending, forks, endings, tokens that are forced,
    distributions that are cut, more sessions at once than it says that it holds, seeds, closing,
    cancelling, and that old sessions end at a sync.

    Args:
        engine: The engine, not started yet. It is closed at the end.
        policy: A small one; `Policy.load` was called.
        temperature: Of the samples.
    """
    name = type(engine).__name__
    try:
        with _on(f"{name}.start(policy, 64), and sync(1) after it,"):
            engine.start(policy, 64)
            engine.sync(1)
            holds = engine.capacity
            _require(holds is None or holds >= 1, f"holds {holds} sessions: give None or a number")
        asyncio.run(_check_engine(engine, policy, temperature))
    finally:
        with _on(f"{name}.close(), called twice,"):
            engine.close()
            engine.close()


async def _check_engine(engine: types.Engine, policy: types.SampledPolicy, heat: float) -> None:
    import torch

    name, prompt, greedy = type(engine).__name__, [5, 9, 33, 71], types.Sampling(6, 0.0)

    async def sample(sampling: types.Sampling) -> types.Completion:
        with _on(f"{name}, to go on from {prompt} with {sampling},"):
            return await engine.open(prompt).generate([], sampling)

    async def if_able(sampling: types.Sampling) -> types.Completion | None:
        try:
            return await sample(sampling)
        except _Breach as error:
            if isinstance(error.__cause__, NotImplementedError):
                return None
            raise

    def like(one: types.Completion, other: types.Completion) -> bool:
        """True if two differ by rounding alone: what is sampled in company is rounded otherwise."""
        gaps = (abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
        return one.token_ids == other.token_ids and max(gaps) < 0.05

    for history, new in (([44, 2], [12, 13, 14]), ([7] * 12, [15]), (prompt, [11])):
        with _on(f"{name}, to go on from {history}, then with {new} or, forked, [99],"):
            session = engine.open(history)
            first = await session.generate([], greedy)
            whole = len(first.token_ids) == len(first.logprobs) == 6 and first.reason == "length"
            _require(whole, f"was asked for 6 tokens, and gave {first!r}")
            branch, history = session.fork(), [*history, *first.token_ids]
            later = session.generate(new, greedy), branch.generate([99], greedy)
            for found, appended in zip(await asyncio.gather(*later), (new, [99]), strict=True):
                wanted = await engine.open([*history, *appended]).generate([], greedy)
                told = f"goes on from {history} with {appended} as {found!r}, but"
                _require(like(found, wanted), f"{told} reads the same history as {wanted!r}")
    many = min(engine.capacity or 0, 32) + 2
    with _on(f"{name}, to go on in {many} sessions at once,"):
        crowd = [engine.open([n + 1, *range(20, 60)]) for n in range(many)]
        turns = [
            await asyncio.gather(*(s.generate(new, greedy) for s in crowd)) for new in ([], [7])
        ]
        for n, found in enumerate(turns[1][:3]):
            history = [n + 1, *range(20, 60), *turns[0][n].token_ids, 7]
            wanted = await engine.open(history).generate([], greedy)
            _require(like(found, wanted), f"gives {found!r}, and {wanted!r} alone")
    ids = first.token_ids
    ended = await sample(types.Sampling(6, 0.0, end_ids=(ids[3],)))
    right = ended.token_ids == ids[: ids.index(ids[3]) + 1] and ended.reason == "end"
    _require(right, f"{name} does not end at the token {ids[3]}: {ended!r}")
    texts = [str(policy.tokenizer.decode(list(ids[: n + 1]))) for n in range(6)]
    stop = next((t[-1] for t in texts if t[-1:].isascii() and t[-1:].isprintable() and t), None)
    if stop is not None:
        stopped = await sample(types.Sampling(6, 0.0, stop=(stop,)))
        count = next(n for n, t in enumerate(texts, 1) if stop in t)
        right = stopped.token_ids == ids[:count] and stopped.reason == "stop"
        _require(right, f"{name} does not stop at {stop!r}: {stopped!r}")
    likely = await sample(greedy)
    given = (likely.token_ids[0], *likely.token_ids[:2])
    forced = await if_able(types.Sampling(6, 0.0, forced_ids=given))
    right = forced is None or forced.token_ids[:3] == given
    _require(right, f"{name} was to take {given}, and gave {forced!r}")
    cuts = (types.Sampling(6, heat, top_k=1), types.Sampling(6, heat, min_p=1.0))
    for sampling in (*cuts, types.Sampling(6, heat, top_p=1e-6)):
        alone = await if_able(sampling)
        right = alone is None or alone.token_ids == likely.token_ids
        told = (
            f"{name} is to draw the likeliest tokens alone, of log-probability 0, with {sampling}"
        )
        _require(right and not (alone and min(alone.logprobs) < -1e-3), f"{told}: {alone!r}")
    samples = [await sample(types.Sampling(6, heat, n)) for n in (1, *range(1, 10))]
    gave, ids = samples[0].logprobs, samples[0].token_ids
    # one plain pass over the history
    read = torch.tensor([[*prompt, *ids]], device=next(policy.load().parameters()).device)
    with torch.no_grad():
        at = torch.arange(read.shape[1]).to(read)[None]
        hidden = policy.hidden(read, None, at)[0, len(prompt) - 1 : -1]
        log_p = (policy.logits(hidden) / heat).log_softmax(-1)
    own = [float(row[token]) for row, token in zip(log_p, ids, strict=True)]
    gap = max(abs(a - b) for a, b in zip(gave, own, strict=True))
    _require(gap < 0.1, f"{name} gives log-probabilities {gave}; the policy's are {own}")
    drawn = [sample.token_ids for sample in samples]
    kept = drawn[0] == drawn[1] and len(set(drawn)) > 1
    _require(kept or not engine.seeded, f"{name} is seeded, but seeds 1, 1, 2, ... give {drawn}")

    async def refuses(session: types.Session, why: str) -> None:
        with contextlib.suppress(RuntimeError):
            await session.generate([], greedy)
            _require(False, f"generates {why}")

    with _on(f"a session of {name}, closed or cancelled,"):
        closed, session = engine.open(prompt), engine.open(prompt)
        closed.close()
        closed.close()
        await refuses(closed, "after close()")
        task = asyncio.ensure_future(session.generate([], types.Sampling(40, 0.0)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await engine.drain()
        if task.cancelled() or not task.result():
            await refuses(session, "after a turn that was cancelled, of which it knows a part")
    with _on(f"{name}, after a second sync,"):
        session = engine.open(prompt)
        before = await session.generate([], greedy)
        engine.sync(2)
        await refuses(session, "on in a session that remembers older weights")
        after = await engine.open(prompt).generate([], greedy)
        told = f"with the same weights, gives {before!r} and {after!r}"
        _require(like(before, after), told)
        await engine.drain()


class ScriptedEngine(types.Engine):
    """An engine whose sessions say given texts.

    Args:
        tokenizer: Makes tokens of the texts.
        says: The text of a turn, by number of the session (in the order of forking) and of the
            turn; may be a coroutine.

    Attributes:
        asked: (session, history, sampling) of every turn, in order.
        open_sessions: Sessions that are not closed yet.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, says: Callable[[int, int], Any]) -> None:
        self.tokenizer, self.says = tokenizer, says
        self.asked: list[tuple[int, list[int], types.Sampling]] = []
        self.open_sessions: set[types.Session] = set()
        self.drained = False
        self._numbers = itertools.count()

    def start(self, policy: types.SampledPolicy, max_tokens: int) -> None:
        """Nothing to do."""

    def sync(self, version: int) -> None:
        """Nothing to do: texts are given."""

    def open(self, prompt_ids: Sequence[int]) -> types.Session:
        """A session that has no number: its forks have."""
        return _Scripted(self, list(prompt_ids), -1, 0)

    async def drain(self) -> None:
        """Note that it was called."""
        self.drained = True

    def close(self) -> None:
        """Nothing to give back."""


class _Scripted(types.Session):
    def __init__(self, engine: ScriptedEngine, history: list[int], number: int, turn: int) -> None:
        self._engine, self._history, self._number, self._turn = engine, history, number, turn
        engine.open_sessions.add(self)

    async def generate(self, new_ids: Sequence[int], sampling: types.Sampling) -> types.Completion:
        engine = self._engine
        self._history += new_ids
        engine.asked.append((self._number, list(self._history), sampling))
        said, self._turn = engine.says(self._number, self._turn), self._turn + 1
        text = await said if isinstance(said, Awaitable) else said
        encoded = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = tuple(encoded[: sampling.max_tokens])
        self._history += ids
        cut = len(ids) < len(encoded)
        return types.Completion(ids, (-0.5,) * len(ids), "length" if cut else "stop")

    def fork(self) -> types.Session:
        engine = self._engine
        return _Scripted(engine, list(self._history), next(engine._numbers), self._turn)

    def close(self) -> None:
        self._engine.open_sessions.discard(self)
