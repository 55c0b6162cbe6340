"""What a plugin must keep to, as functions to call in its tests.

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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jsonschema

from turnrl.errors import DataError
from turnrl.text import neutralise, normalize_answer
from turnrl.types import (
    AdvantageEstimator,
    Completion,
    Engine,
    Group,
    OutcomeReward,
    Passage,
    Question,
    QuestionSource,
    Reading,
    Reward,
    SampledPolicy,
    Sampling,
    Segmenter,
    Session,
    Tool,
    ToolCall,
    ToolResult,
    ToolSession,
    Trajectory,
    Turn,
    TurnReward,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Breach(AssertionError):
    """What `_require` raises, so that it can be told from an assertion of the plugin's own."""


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
    except _Breach as breach:
        raise _Breach(f"{what} {breach}") from breach.__cause__
    except Exception as error:
        raise _Breach(f"{what} raised {type(error).__name__}: {error}") from error


# -------------------------------------------------------------------------------------------- tools


def check_tool(
    tool: Tool, good_calls: Sequence[Mapping[str, Any]], bad_calls: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Check a tool: its description, its preflight check, its sessions, and its replies.

    Each call has a session of its own, if the tool opens them.

    Args:
        tool: The tool, with whatever it needs at hand.
        good_calls: Arguments of calls that must succeed.
        bad_calls: Arguments that are the policy's mistake: the schema rejects them, or the result
            is not `ok` and says why.
    """
    name = type(tool).__name__
    _require(bool(good_calls), f"give check_tool a good call of {name}")
    named = isinstance(tool.name, str) and re.fullmatch(r"\w[\w.-]*", tool.name) is not None
    _require(named, f"{name}.name is {tool.name!r}: use letters, digits, _, - and .")
    _require(bool(tool.description.strip()), f"{name}.description is empty")
    _require(tool.timeout_s > 0, f"{name}.timeout_s is {tool.timeout_s}")
    _require(
        tool.parameters.get("type") == "object",
        f"{name}.parameters must be the JSON Schema of an object, not {tool.parameters!r}",
    )
    jsonschema.Draft202012Validator.check_schema(tool.parameters)
    schema = jsonschema.Draft202012Validator(tool.parameters)
    tool.check()

    _require(_run(tool, []) == [], f"{name}.run of no calls must give no results")
    for arguments in good_calls:
        errors = [error.message for error in schema.iter_errors(dict(arguments))]
        _require(not errors, f"{name}.parameters rejects the good call {arguments!r}: {errors}")
    together = _run(tool, good_calls)
    for arguments, result in zip(good_calls, together, strict=True):
        _require(result.ok, f"{name} fails on the good call {arguments!r}: {result.content!r}")
        _require(bool(result.content), f"{name} replies to {arguments!r} with an empty text")
        (alone,) = _run(tool, [arguments])
        _require(
            alone.content == result.content,
            f"{name} replies to {arguments!r} with {alone.content!r} alone and {result.content!r} "
            "in a batch; results must be in the order of the calls",
        )
    for arguments in bad_calls:
        if schema.is_valid(dict(arguments)):
            (result,) = _run(tool, [arguments])
            told = f"{arguments!r}: {result.content!r}"
            _require(not result.ok, f"{name} accepts the bad call {told}")
            _require(bool(result.content), f"{name} does not say what is wrong with {arguments!r}")


def _run(tool: Tool, some: Sequence[Mapping[str, Any]]) -> list[ToolResult]:
    """The results of a batch, each call in a session of its own."""
    return asyncio.run(_in_sessions(tool, some))


async def _in_sessions(tool: Tool, some: Sequence[Mapping[str, Any]]) -> list[ToolResult]:
    name = type(tool).__name__
    question = Question("q", "What?", ("x",))
    sessions = [await _settled(tool.open(question)) for _ in some]
    for session in sessions:
        kept = session is None or isinstance(session, ToolSession)
        _require(kept, f"{name}.open must give a ToolSession or None, not {session!r}")
    calls = [ToolCall(tool.name, a, session=s) for a, s in zip(some, sessions, strict=True)]
    replies = await _settled(tool.run(calls))
    for session in filter(None, sessions):
        await _settled(session.close())
    complete = isinstance(replies, Sequence) and len(replies) == len(calls)
    _require(complete, f"{name}.run must give a result per call, not {replies!r} for {len(calls)}")
    for reply in replies:
        fits = isinstance(reply, ToolResult) and isinstance(reply.content, str)
        _require(fits, f"{name}.run must give ToolResults with a text, not {reply!r}")
    return list(replies)


async def _settled(value: Any) -> Any:
    """A value, waited for if it is awaitable."""
    return await value if isinstance(value, Awaitable) else value


# --------------------------------------------------------------------------------------- segmenters


def check_segmenter(segmenter: Segmenter, texts: int = 2000) -> None:
    """Check a segmenter: its prompt, that it reads any text, and that it shows results as they are.

    Args:
        segmenter: The segmenter.
        texts: How many random texts to read.
    """
    name = type(segmenter).__name__
    _require(segmenter.max_turns >= 1, f"{name}.max_turns is {segmenter.max_turns}")
    for attribute in ("stop", "tags"):
        values = getattr(segmenter, attribute)
        texts_only = isinstance(values, tuple) and all(isinstance(v, str) and v for v in values)
        _require(texts_only, f"{name}.{attribute} must be a tuple of texts, not {values!r}")
    for stop in segmenter.stop:
        tag = re.fullmatch(r"</?(\w+)>", stop)
        _require(
            tag is None or tag[1] in segmenter.tags,
            f"{name} stops at {stop!r}, so {tag and tag[1]!r} must be in its tags: "
            "else a tool result could contain it",
        )
    _check_prompt(segmenter, name)
    for text in _soups(segmenter, texts):
        for turn in (0, segmenter.max_turns - 1):
            reading = _check_read(segmenter, name, text, turn)
            _check_observe(segmenter, name, reading, text)
            part = text[: len(text) * 2 // 3]
            cut = segmenter.read(part, turn, True)
            _require(
                cut.answer in (None, reading.answer),
                f"{name}.read takes the answer {cut.answer!r} from {part!r}, which was cut: whole, "
                f"it is {text!r} and answers {reading.answer!r}",
            )
    reading = segmenter.read("Lorem ipsum dolor sit amet.", 0, False)
    formless = reading.answer is None or reading.format_error is not None or not segmenter.tags
    _require(formless, f"{name} takes plain text for a well-formed turn: {reading!r}")


def _check_prompt(segmenter: Segmenter, name: str) -> None:
    question = Question("q", "What is the time zone of Utrecht?", ("Europe/Amsterdam",))
    for tools in ([], [_Echo()]):
        messages = segmenter.prompt(question, tools)
        _require(bool(messages), f"{name}.prompt gives no messages")
        for message in messages:
            known = message.get("role") in ("system", "user", "assistant")
            fits = known and len(message) == 2 and isinstance(message.get("content"), str)
            _require(fits, f"{name}.prompt gives {message!r}, which is no chat message")
        _require(messages[-1]["role"] == "user", f"{name}.prompt must end with the user's message")
        asked = any(question.text in message["content"] for message in messages)
        _require(asked, f"{name}.prompt leaves the question out")


def _check_read(segmenter: Segmenter, name: str, text: str, turn: int) -> Reading:
    try:
        reading = segmenter.read(text, turn, False)
    except Exception as error:
        raise AssertionError(
            f"{name}.read must read any text; on {text!r} it raised {type(error).__name__}: {error}"
        ) from error
    what = f"{name}.read gave {reading!r} for {text!r}"
    _require(isinstance(reading, Reading), f"{what}, which is no Reading")
    again = segmenter.read(text, turn, False)
    _require(reading == again, f"{what}, and something else the second time")
    _require(isinstance(reading.answer, str | None), f"{what}: answer is no text")
    for call in reading.calls:
        _require(isinstance(call, ToolCall), f"{what}: {call!r} is no ToolCall")
        _require(bool(call.name) or bool(call.error), f"{what}: a call has neither name nor error")
        _require(isinstance(call.arguments, Mapping), f"{what}: arguments are no mapping")
    acts = bool(reading.calls) or reading.answer is not None or bool(reading.format_error)
    _require(acts, f"{what}: a turn that neither calls nor answers needs a format_error")
    return reading


def _check_observe(segmenter: Segmenter, name: str, reading: Reading, text: str) -> None:
    content = neutralise(text, segmenter.tags, [])
    results = [
        ToolResult(content, ok) for ok, _ in zip(itertools.cycle((True, False)), reading.calls)
    ]
    messages = segmenter.observe(reading, results)
    told = f"{name}.observe must give messages of role user or tool with a text, not {messages!r}"
    _require(isinstance(messages, list) and bool(messages), told)
    for m in messages:
        _require(m.get("role") in ("user", "tool") and bool(m.get("content")), told)
    shown = "\n".join(message["content"] for message in messages)
    whole = shown.count(content) >= len(results) or not content
    _require(whole, f"{name}.observe must show each result as it is; {content!r} became {shown!r}")


def _soups(segmenter: Segmenter, count: int) -> Iterator[str]:
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


class _Echo(Tool):
    """Repeats a text."""

    name = "echo"
    description = "Repeat a text."
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}

    def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        return [ToolResult(str(call.arguments["text"])) for call in calls]


# ------------------------------------------------------------------------------------------ rewards


def check_reward(reward: Reward, trajectories: Mapping[str, Trajectory] | None = None) -> None:
    """Check a reward: finite numbers, the same each time, and nothing to gain by garbage.

    Args:
        reward: A turn reward or an outcome reward.
        trajectories: What to score, by name; `example_trajectories` by default. Those whose name
            begins with `garbage` may earn nothing, unless every other one earns as much.
    """
    name = type(reward).__name__
    one_kind = isinstance(reward, TurnReward) != isinstance(reward, OutcomeReward)
    _require(one_kind, f"{name} must extend either TurnReward or OutcomeReward")
    named = re.fullmatch(r"[a-z0-9_]*", reward.name) is not None
    _require(named, f"{name}.name is {reward.name!r}: use lower case, digits and _, as in metrics")
    totals = {}
    for label, trajectory in (trajectories or example_trajectories()).items():
        scores = _score(reward, trajectory)
        for score in scores:
            finite = isinstance(score, int | float) and math.isfinite(score)
            _require(finite, f"{name} gave {score!r} for {label!r}, which is not a finite number")
        again = _score(reward, trajectory)
        _require(scores == again, f"{name} scores {label!r} differently the second time")
        totals[label] = sum(scores)
    least = min(totals.values())
    for label, total in totals.items():
        earned = not label.startswith("garbage") or total <= max(0.0, least)
        _require(earned, f"{name} pays {total} for {label!r}: garbage may earn nothing")


def _score(reward: Reward, trajectory: Trajectory) -> list[float]:
    if isinstance(reward, TurnReward):
        return [reward.score(trajectory, k) for k in range(len(trajectory.turns))]
    if isinstance(reward, OutcomeReward):
        return [reward.score(trajectory)]
    raise AssertionError(f"{type(reward).__name__} must extend TurnReward or OutcomeReward")


_Step = tuple[Reading, tuple[ToolResult, ...]]

_CALL = ToolCall("search", {"query": "Utrecht"})
_PAGE = ToolResult("Utrecht is in the time zone Europe/Amsterdam.")
_SEARCHED: _Step = (Reading((_CALL,)), (_PAGE,))
_RIGHT: _Step = (Reading(answer="Europe/Amsterdam"), ())


def _attempt(
    *steps: _Step, text: str = "some text", answers: tuple[str, ...] = ("Europe/Amsterdam", "CET")
) -> Trajectory:
    turns = tuple(
        Turn(text, (7, 8, 9), (-0.1, -0.2, -0.3), reading, results, (5,) if results else ())
        for reading, results in steps
    )
    question = Question("q", "What is the time zone of Utrecht?", answers)
    answered = turns[-1].reading.answer is not None
    return Trajectory(question, (1, 2, 3), turns, "answer" if answered else "turns")


def example_trajectories() -> dict[str, Trajectory]:
    """Attempts at one question, by name: good ones, failed ones, and garbage."""
    garbled: _Step = (Reading(format_error="no tool call or answer"), ())
    unreadable = Reading((ToolCall("", error="bad JSON"),), None, "bad JSON")
    return {
        "right after a search": _attempt(_SEARCHED, _RIGHT),
        "right without a search": _attempt(_RIGHT),
        "wrong after a search": _attempt(_SEARCHED, (Reading(answer="Asia/Tokyo"), ())),
        "answer among others": _attempt(
            _SEARCHED, (Reading(answer="Europe/Amsterdam or Asia"), ())
        ),
        "nothing found": _attempt((Reading((_CALL,)), (ToolResult("no results"),)), _RIGHT),
        "failed call": _attempt((Reading((_CALL,)), (ToolResult("no such tool", False),)), _RIGHT),
        "unreadable call": _attempt((unreadable, (ToolResult("bad JSON", False),)), _RIGHT),
        "two calls, one failed": _attempt(
            (Reading((_CALL, _CALL)), (_PAGE, ToolResult("unknown tool", False))), _RIGHT
        ),
        "no accepted answers": _attempt(_SEARCHED, _RIGHT, answers=()),
        "garbage": _attempt(garbled, garbled),
        "garbage that names the answer": _attempt(garbled, garbled, text="Europe/Amsterdam"),
        "garbage of one turn": _attempt(garbled),
        "garbage with an empty answer": _attempt(
            (Reading(answer="", format_error="the answer is empty"), ()), answers=("", "the")
        ),
    }


# --------------------------------------------------------------------------------------- estimators


def check_estimator(estimator: AdvantageEstimator) -> None:
    """Check an estimator on drawn groups of `min_group_size` trajectories and more: finite
    advantages of the right shape, zero for a turn that was not taken, each with its trajectory
    whatever the order of the group; and that it is a pure function.

    That it should heed any reward, or not heed a constant, is not asked.

    Args:
        estimator: The estimator.
    """
    import torch

    name, least = type(estimator).__name__, estimator.min_group_size
    _require(isinstance(least, int) and least >= 1, f"{name}.min_group_size is {least!r}")
    draw = random.Random(0)
    shapes = itertools.product((least, least + 1, least + 6), (1, 2, 4))
    for group in itertools.chain.from_iterable(_groups(draw, *shape) for shape in shapes):
        given = group.turn_rewards, group.outcome, group.reached
        rewards, outcome, reached = numbers = [tensor.tolist() for tensor in given]
        shape = tuple(group.reached.shape)
        told = f"turn rewards {rewards}, outcome {outcome}, reached {reached}"
        with _on(f"{name} on a group of shape {shape} ({told})"):
            found = estimator(group)
            fits = isinstance(found, torch.Tensor) and found.is_floating_point()
            fits = fits and tuple(found.shape) == shape
            _require(fits, f"gives {found!r}, which is no float tensor of that shape")
            first, gave = found.clone(), f"gives {found.tolist()}"
            _require(first.isfinite().all(), f"{gave}, which is not finite")
            _require(not first[~group.reached].any(), f"{gave}, not zero where not reached")
            _require([t.tolist() for t in given] == numbers, "changes the tensors of the group")
            again = estimator(group)
            _require(torch.equal(first, again), f"{gave}, and then {again.tolist()}")
            order = draw.sample(range(shape[0]), shape[0])
            attempts = tuple(group.trajectories[i] for i in order)
            parts = tuple(group.components[i] for i in order)
            turned, ended, there = (tensor[order] for tensor in given)
            moved = estimator(Group(group.question, attempts, turned, ended, there, parts))
            gap = float((moved - first[order]).abs().max())
            _require(
                gap <= 1e-3 * max(1.0, float(first.abs().max())),
                f"{gave}, but {moved.tolist()} to the same trajectories in the order {order}",
            )


def _groups(draw: random.Random, size: int, turns: int) -> Iterator[Group]:
    """Scored groups of a shape, of every kind that a collection may give."""
    import torch

    def drawn(unit: float) -> Callable[[int], float]:
        return lambda i: draw.randrange(-8, 17) * unit

    some = [draw.randint(1, turns) for _ in range(size)]
    lengths = ([turns] * size, some, [turns, *[1] * (size - 1)], [1] * size)
    # multiples of powers of two have exact sums, so that what is equal stays equal
    alike = (lambda i: 0.5, lambda i: 1.5 if i == 0 else 0.5)
    rewards = (drawn(2.0**-3), drawn(2.0**17), drawn(2.0**-23), *alike)
    for taken, reward in itertools.product(lengths, rewards):
        reached = torch.arange(turns) < torch.tensor(taken)[:, None]
        of_turns = torch.tensor([[reward(i) for _ in range(turns)] for i in range(size)]) * reached
        outcome = torch.tensor([reward(i) for i in range(size)])
        attempts = tuple(
            _attempt(*[_SEARCHED] * (n - 1), _RIGHT, text=f"attempt {i}")
            for i, n in enumerate(taken)
        )
        totals = zip(of_turns.sum(1).tolist(), outcome.tolist(), strict=True)
        parts = tuple({"turn/drawn": turn, "outcome/drawn": end} for turn, end in totals)
        yield Group(attempts[0].question, attempts, of_turns, outcome, reached, parts)


# ------------------------------------------------------------------------------------------ sources


def check_source(source: QuestionSource) -> None:
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
    told = f"{name}.default_splits is {splits!r}: give 'train' and 'val' a split each"
    _require(fits and known, f"{told}, or one of them None")
    for split in known:
        with _on(f"{name}.questions({split!r})"):
            found = list(source.questions(split))
            _check_texts(found, Question)
            for question in found:
                answers = question.answers
                fits = isinstance(answers, tuple) and all(isinstance(a, str) for a in answers)
                _require(fits, f"gives {question!r}, whose answers are no tuple of texts")
            usable = any(normalize_answer(a) for question in found for a in question.answers)
            _require(usable, f"gives {found[0]!r}, and none that has an answer to match")
            for pair in itertools.zip_longest(found, source.questions(split)):
                first, again = (q and (q.id, q.text, q.answers) for q in pair)
                _require(first == again, f"gives {first}, and the second time {again}")
    with _on(f"{name}.questions('no-such-split')"):
        try:
            number = len(list(source.questions("no-such-split")))
            _require(False, f"gives {number} questions; it must raise a DataError")
        except DataError as error:
            listed = all(split in str(error) for split in known)
            _require(listed, f"raises {error!r}, which does not list the splits there are: {known}")
    with _on(f"{name}.passages()"), contextlib.suppress(DataError):
        _check_texts(list(itertools.islice(source.passages(), 3000)), Passage)


def _check_texts(found: Sequence[Any], kind: type) -> None:
    """That there are questions or passages, each with a text and an id of its own."""
    _require(found, "gives nothing")
    seen: dict[str, Any] = {}
    for one in found:
        fits = isinstance(one, kind)
        fits = fits and all(isinstance(v, str) and v.strip() for v in (one.id, one.text))
        _require(fits, f"gives {one!r}, which is no {kind.__name__} with an id and a text")
        _require(one.id not in seen, f"gives one id to {seen.get(one.id)!r} and to {one!r}")
        seen[one.id] = one


# ------------------------------------------------------------------------------------------ engines


def check_engine(engine: Engine, policy: SampledPolicy, temperature: float = 1.0) -> None:
    """Check an engine on a policy: exact appending, forks, endings, seeds, closing, cancelling, and
    that old sessions end at a sync.

    Args:
        engine: The engine, not started yet. It is closed at the end.
        policy: A small one; `Policy.load` was called.
        temperature: Of the samples.
    """
    engine.start(policy, 64)
    try:
        asyncio.run(_check_engine(engine, policy, temperature))
    finally:
        engine.close()
        engine.close()


def _own_logprobs(
    policy: SampledPolicy, prompt: Sequence[int], sampled: Sequence[int], temperature: float
) -> list[float]:
    """The policy's log-probabilities of sampled tokens, by one plain pass over the history."""
    import torch

    ids = torch.tensor([[*prompt, *sampled]], device=next(policy.load().parameters()).device)
    with torch.no_grad():
        hidden = policy.hidden(ids, None, torch.arange(ids.shape[1]).to(ids)[None], use_cache=False)
        log_p = (policy.logits(hidden[0, len(prompt) - 1 : -1]) / temperature).log_softmax(-1)
    return [float(row[token]) for row, token in zip(log_p, sampled, strict=True)]


async def _check_engine(engine: Engine, policy: SampledPolicy, temperature: float) -> None:
    name = type(engine).__name__
    greedy = Sampling(6, 0.0)
    prompt = [5, 9, 33, 71]
    engine.sync(1)
    for history, new in (([44, 2], [12, 13, 14]), ([7] * 12, [15]), (prompt, [11])):
        session = engine.open(history)
        first = await session.generate([], greedy)
        whole = len(first.token_ids) == len(first.logprobs) == 6 and first.reason == "length"
        _require(whole, f"{name}: asked for 6 tokens, it gave {first!r}")
        history = [*history, *first.token_ids]
        branch = session.fork()
        later = session.generate(new, greedy), branch.generate([99], greedy)
        for found, appended in zip(await asyncio.gather(*later), (new, [99]), strict=True):
            wanted = await engine.open([*history, *appended]).generate([], greedy)
            gaps = (abs(a - b) for a, b in zip(found.logprobs, wanted.logprobs, strict=True))
            _require(
                found.token_ids == wanted.token_ids and max(gaps) < 0.05,
                f"{name} goes on from {history} with {appended} as {found!r}, but reads the same "
                f"history as {wanted!r}",
            )
    ids = first.token_ids
    ended = await engine.open(prompt).generate([], Sampling(6, 0.0, end_ids=(ids[3],)))
    right = ended.token_ids == ids[: ids.index(ids[3]) + 1] and ended.reason == "end"
    _require(right, f"{name} does not end at the token {ids[3]}: {ended!r}")
    texts = [str(policy.tokenizer.decode(list(ids[: n + 1]))) for n in range(6)]
    stop = next((t[-1] for t in texts if t[-1:].isascii() and t[-1:].isprintable() and t), None)
    if stop is not None:
        stopped = await engine.open(prompt).generate([], Sampling(6, 0.0, stop=(stop,)))
        count = next(n for n, t in enumerate(texts, 1) if stop in t)
        right = stopped.token_ids == ids[:count] and stopped.reason == "stop"
        _require(right, f"{name} does not stop at {stop!r}: {stopped!r}")
    samples = [
        await engine.open(prompt).generate([], Sampling(6, temperature, seed))
        for seed in (1, *range(1, 10))
    ]
    gave = samples[0].logprobs
    own = _own_logprobs(policy, prompt, samples[0].token_ids, temperature)
    gap = max(abs(a - b) for a, b in zip(gave, own, strict=True))
    _require(gap < 0.1, f"{name} gives log-probabilities {gave}; the policy's are {own}")
    drawn = [sample.token_ids for sample in samples]
    kept = drawn[0] == drawn[1] and len(set(drawn)) > 1
    _require(kept or not engine.seeded, f"{name} is seeded, but seeds 1, 1, 2, ... give {drawn}")

    async def refuses(session: Session, why: str) -> None:
        try:
            await session.generate([], greedy)
        except RuntimeError:
            return
        _require(False, f"a session of {name} generates {why}")

    closed, cancelled, older = (engine.open(prompt) for _ in range(3))
    closed.close()
    closed.close()
    await refuses(closed, "after close()")
    task = asyncio.ensure_future(cancelled.generate([], Sampling(40, 0.0)))
    await asyncio.sleep(0)
    task.cancel()
    await engine.drain()
    if task.cancelled():
        await refuses(cancelled, "after a turn that was cancelled, of which it knows only a part")
    before = await older.generate([], greedy)
    engine.sync(2)
    await refuses(older, "after a sync, with what it remembers of older weights")
    after = await engine.open(prompt).generate([], greedy)
    _require(before == after, f"{name}: the same weights give {before!r} and {after!r}")
    await engine.drain()


class ScriptedEngine(Engine):
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
        self.asked: list[tuple[int, list[int], Sampling]] = []
        self.open_sessions: set[Session] = set()
        self.drained = False
        self._numbers = itertools.count()

    def start(self, policy: SampledPolicy, max_tokens: int) -> None:
        """Nothing to do."""

    def sync(self, version: int) -> None:
        """Nothing to do: texts are given."""

    def open(self, prompt_ids: Sequence[int]) -> Session:
        """A session that has no number: its forks have."""
        return _Scripted(self, list(prompt_ids), -1, 0)

    async def drain(self) -> None:
        """Note that it was called."""
        self.drained = True

    def close(self) -> None:
        """Nothing to give back."""


class _Scripted(Session):
    def __init__(self, engine: ScriptedEngine, history: list[int], number: int, turn: int) -> None:
        self._engine, self._history, self._number, self._turn = engine, history, number, turn
        engine.open_sessions.add(self)

    async def generate(self, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        engine = self._engine
        self._history += new_ids
        engine.asked.append((self._number, list(self._history), sampling))
        text = await _settled(engine.says(self._number, self._turn))
        self._turn += 1
        encoded = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = tuple(encoded[: sampling.max_tokens])
        self._history += ids
        cut = len(ids) < len(encoded)
        return Completion(ids, (-0.5,) * len(ids), "length" if cut else "stop")

    def fork(self) -> Session:
        engine = self._engine
        return _Scripted(engine, list(self._history), next(engine._numbers), self._turn)

    def close(self) -> None:
        self._engine.open_sessions.discard(self)
