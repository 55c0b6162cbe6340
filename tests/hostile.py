"""Texts of 20 kB that are meant to be slow to read, and the CPU time that each of them may take.

A policy, a tool or a judge can write any of them. So no reader, rule, reward or chat format may
take more than `MOST_S` for one, neither as it is nor inside a call or an answer (`framed`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

SIZE = 20_000
"""Characters of each text."""
MOST_S = 0.2
"""The most CPU time for one text, in seconds."""

_UNITS = {
    "white space": [
        *[" ", "\n", "\t", "\r\n", " \n", "\u00a0", "\u2028", "\u200b", "\u0000"],
    ],
    "one character": [
        *["a", "A", "1", "0", ".", ",", "-", "_", "*", "\\", "'", '"', "`", "~", "^"],
    ],
    "words": [
        *["a ", "the ", "a. ", "a, ", "A. ", "so ", "not ", "Paris ", "a\n", "...", "?!"],
        *["- "],
    ],
    "other alphabets": [
        *["é", "e\u0301", "\u0301", "ß", "İ", "ſ", "日本", "😀", "👩\u200d", "ﷺ", "½"],
    ],
    "brackets": [
        *["<", ">", "[", "]", "(", ")", "{", "}", "[]", "{}", "()", "<>", "</", "<a ", "<|"],
    ],
    "tags": [
        *["<think>", "</think>", "<think></think>", "<tool_call>"],
        *["<tool_call>{}</tool_call>\n", "</tool_call>", "<tool>", "<tool ", "<tools"],
        *["< / tool", "<answer>", "</answer>", "<answer></answer>", "<search>", "</search>"],
        *["<result>", "<p>Paris</p>", "<action>", "<tool_response>", "</tool_response>"],
        *["<tool " + " " * 50, "<" + " " * 50, "<" + "/" * 50],
    ],
    "control tokens": [
        *["<|im_end|>", "<|im_start|>assistant\n", "<|", "|>", "<|im_", "<<|im_end|>", "<s>"],
        *["</s>", "<bos>", "[TOOL_RESULTS]", "[gMASK]", "[INST]", "[/INST]", "<|endoftext|>"],
        *["<｜", "<unused"],
    ],
    "JSON": [
        *['{"a":', '{"a":1,', '["', "[[", "{'a':", "'\\", "\\'", '\\"', "\\u", "\\ud800"],
        *["1e9", "1,", '{"name": "look", "arguments": {}}', "true,", "True ", "None", "NaN"],
        *['{"name"', "```", "//"],
    ],
    "numbers": [
        *["1 ", "1,", "1.", "1 000 ", "1,000,", "1/", "10^", "9^{", "2**", "-1", "1e", "½ "],
        *["1(", "1;", "\\frac{", "\\frac{1}{2}", "\\boxed{", "\\boxed{}", "\\sqrt{", "$1$"],
        *["\\left(", "1=", "1<"],
    ],
}  # fmt: skip


def _texts() -> Iterator[tuple[str, str]]:
    for kind, parts in _UNITS.items():
        for part in parts:
            yield f"{kind}: {part[:24]!a}", (part * (SIZE // len(part) + 1))[:SIZE]
    half = SIZE // 2
    yield "nested lists", "[" * half + "]" * half
    yield "nested objects", '{"a":' * (SIZE // 6) + "1" + "}" * (SIZE // 6)
    yield "a tower of powers", "9" + "^{9" * (SIZE // 4) + "}" * (SIZE // 4)
    yield "a word between spaces", " " * half + "a" + " " * half
    yield "many different words", " ".join(f"w{i}" for i in range(SIZE // 6))
    yield "many different tags", "".join(f"<t{i}>" for i in range(SIZE // 7))


TEXTS: dict[str, str] = dict(_texts())
"""The texts, by name."""


def framed(text: str, before: str = "", after: str = "") -> str:
    """A hostile text between two others, such as tags, in as many characters as it had."""
    return before + text[: SIZE - len(before) - len(after)] + after


def cpu_s(work: Callable[[], object]) -> float:
    """The CPU time of a call, in seconds. The best of three tries if the first took too long: a
    busy machine makes work longer, never shorter."""

    def once() -> float:
        gc.disable()  # else the heap of all tests before this one is searched in between
        begun = time.process_time()
        try:
            work()
            return time.process_time() - begun
        finally:
            gc.enable()

    first = once()
    return first if first <= MOST_S else min(first, once(), once())


def too_slow(read: Callable[[str], object], before: str = "", after: str = "") -> dict[str, float]:
    """The hostile texts that take too long, with the CPU time of each; empty if none does.

    Args:
        read: What is done with a text.
        before: What stands before each text, such as an opening tag.
        after: What stands after it.
    """
    read(framed("warm", before, after))
    times = {
        name: cpu_s(lambda text=text: read(framed(text, before, after)))  # type: ignore[misc]
        for name, text in TEXTS.items()
    }
    return {name: seconds for name, seconds in times.items() if seconds > MOST_S}
