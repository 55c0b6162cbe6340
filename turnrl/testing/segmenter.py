"""Check of a segmenter."""

import contextlib
import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence

from turnrl.agent.messages import plain_text, to_plain
from turnrl.plugin.errors import PluginError, RecipeError
from turnrl.plugin.text import neutralize
from turnrl.testing.contract import reporting_breaches, require
from turnrl.testing.examples import QUESTION
from turnrl.types.acting import Segmenter
from turnrl.types.sessions import ToolSpec
from turnrl.types.trajectory import Message, Reading, ToolCall, ToolResult


def check_segmenter(segmenter: Segmenter, texts: int = 2000) -> None:
    """Check a segmenter: its prompt, that it reads any text, that it shows results unchanged, and,
    if it writes turns, that it reads them correctly.

    Args:
        segmenter: The segmenter.
        texts: Number of random texts to read.
    Raises:
        AssertionError: If a rule is broken, with the rule and the input.
    """
    check_turns(segmenter, ([], [_ECHO]), texts)
    reading = segmenter.read("Lorem ipsum dolor sit amet.", 0, False)
    formless = reading.answer is None or reading.format_error is not None or not segmenter.tags
    name = type(segmenter).__name__
    require(formless, f"{name} takes plain text for a well-formed turn: {reading!r}")


def check_turns(
    segmenter: Segmenter, toolsets: Sequence[Sequence[ToolSpec]], texts: int = 2000
) -> None:
    """Check everything but that a turn has to have a form: some schemes are meant to have none.

    Args:
        segmenter: The segmenter.
        toolsets: Tools for its prompt, each in a prompt of their own.
        texts: See `check_segmenter`, like the error.
    """
    name = type(segmenter).__name__
    require(segmenter.max_turns >= 1, f"{name}.max_turns is {segmenter.max_turns}")
    for values in (segmenter.stop, segmenter.tags):
        fits = isinstance(values, tuple) and all(isinstance(v, str) and v for v in values)
        require(fits, f"{name}.stop and {name}.tags must be tuples of texts, not {values!r}")
    for stop in segmenter.stop:
        tag = re.fullmatch(r"</?(\w+)>", stop)
        rule = f"{name} stops at {stop!r}, so {tag and tag[1]!r} must be in its tags"
        require(not tag or tag[1] in segmenter.tags, f"{rule}: else a result could contain it")
    for tools in toolsets:
        with reporting_breaches(f"{name}.prompt({QUESTION!r}, {tools!r})"):
            messages = segmenter.prompt(QUESTION, tools)
            shown = _message_texts(messages, "system", "user", "assistant")
            require(messages[-1]["role"] == "user", "must end with the user's message")
            require(QUESTION.text in shown, f"leaves the question out: {messages!r}")
    for text, turn in itertools.product(_soups(segmenter, texts), {0, segmenter.max_turns - 1}):
        with reporting_breaches(f"{name}.read({text!r}, {turn}, cut=False)"):
            reading, again = (segmenter.read(text, turn, False) for _ in range(2))
            gave = f"gives {reading!r}"
            require(isinstance(reading, Reading), f"{gave}, which is not a Reading")
            require(reading == again, f"{gave}, and the second time {again!r}")
            require(isinstance(reading.answer, str | None), f"{gave}: answer is not text")
            for call in reading.calls:
                require(isinstance(call, ToolCall), f"{gave}: {call!r} is no ToolCall")
                require(isinstance(call.arguments, Mapping), f"{gave}: arguments are not a mapping")
                require(call.name or call.error, f"{gave}: a call has neither name nor error")
            acts = reading.calls or reading.answer is not None or reading.format_error
            require(acts, f"{gave}: a turn that neither calls nor answers needs a format_error")
        part = text[: len(text) * 2 // 3]
        with reporting_breaches(f"{name}.read({part!r}, {turn}, cut=True)"):
            answer = segmenter.read(part, turn, True).answer
            rule = f"takes the answer {answer!r} from what was cut: the whole, {text!r}, answers"
            require(answer in (None, reading.answer), f"{rule} {reading.answer!r}")
        if reading.answer is not None:  # it ends the attempt, so nothing is read after it
            continue
        content = neutralize(text, segmenter.tags, [])
        results = [ToolResult(content, n % 2 == 0) for n, _ in enumerate(reading.calls)]
        with reporting_breaches(f"{name}.observe({reading!r}, {results!r})"):
            shown = _message_texts(segmenter.observe(reading, results), "user", "tool")
            whole = shown.count(content) >= len(results) or not content
            require(whole, f"must show each result as it is, not as {shown!r}")
    if type(segmenter).write is not Segmenter.write:
        _check_writing(segmenter)


def _check_writing(segmenter: Segmenter) -> None:
    """Check that a segmenter correctly reads the turns that it writes. A segmenter that takes no
    such calls, or no answers, has no form for them."""
    name = type(segmenter).__name__
    needs = {**_ECHO.parameters, "required": ["text"]}
    segmenter.prompt(QUESTION, [ToolSpec(_ECHO.name, _ECHO.description, needs)])
    texts = [
        "x",
        'a "quoted" {brace}',
        "two\nlines",
        *(f"<{tag}>y</{tag}>" for tag in segmenter.tags),
    ]
    several = segmenter.max_turns > 1  # in a single turn nobody would read a result
    calls = [Reading((ToolCall("echo", {"text": text}),)) for text in texts if several]
    for reading in (*calls, Reading(answer="Utrecht")):
        with reporting_breaches(f"{name}.write({reading!r})"), contextlib.suppress(RecipeError):
            text = segmenter.write(reading)
            require(isinstance(text, str) and text.strip(), f"gives {text!r}, which is not text")
            read = segmenter.read(text, 0, False)
            require(read == reading, f"gives {text!r}, which it reads as {read!r}")
            ends = [text.find(stop) + len(stop) for stop in segmenter.stop if stop in text]
            early = min(ends, default=len(text)) < len(text.rstrip())
            require(not early, f"gives {text!r}, which ends early: it stops at {segmenter.stop}")


def _message_texts(messages: Sequence[Message], *roles: str) -> str:
    """The contents of chat messages, which must have these roles."""
    rule = f"must give messages of role {' or '.join(roles)} with a text, not {messages!r}"
    require(isinstance(messages, list) and messages, rule)
    try:
        texts = [plain_text(to_plain(message)) for message in messages]
    except PluginError as error:
        raise AssertionError(f"{rule}: {error}") from None
    require(all(texts) and all(message["role"] in roles for message in messages), rule)
    return "\n".join(texts)


def _soups(segmenter: Segmenter, count: int) -> Iterator[str]:
    """Texts that a policy might write: empty, tag soup, broken JSON, any unicode, very long."""
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


_ECHO = ToolSpec(
    "echo", "Repeat a text.", {"type": "object", "properties": {"text": {"type": "string"}}}
)
