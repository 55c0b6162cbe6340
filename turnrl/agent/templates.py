"""What a chat template does beyond writing messages: it opens a thought, reads the clock, or throws
dice.

A prompt has to be the same in training, after a resume and in `ask`, on whatever day they run. So
templates are rendered with a clock that stands still (`with_fixed_clock`), and one that writes
random text is refused.
"""

from __future__ import annotations

import re
from datetime import datetime

CLOCK = datetime(2026, 1, 1)
"""The time that every chat template reads."""

_TAG = r"[<\[◁][^<>\[\]◁▷\s]*(?:{})[^<>\[\]◁▷\s]*[>\]▷]"
_THOUGHT = re.compile(
    _TAG.format("think|thought|reason|rationale|analysis|scratch|reflect|plan|cot|monologue")
    + r"|<\|channel\|?>(?:analysis|thought)|<\|open\|>think|<channel\|>|<\|end\|>",
    re.IGNORECASE,
)
"""Tags around thoughts, as model families write them; `<think>` most of all."""
_CLOSING = re.compile(r"/|(?<![a-z])(?:end|no)|off\b|<channel\|>", re.IGNORECASE)

_DATE = re.compile(r"strftime_now\s*\([^)]*\)")
_DIRECTIVES = [
    f"%{flag}{letter}" for flag in ("-", "") for letter in "aAbBcdeDfFHIjmMpRSTuUwWxXyYzZ"
]
# the line feed at its end is not rendered, and keeps the template's first line a first line
_CLOCK_MACRO = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace({form!r}, {CLOCK.strftime(form)!r})" for form in _DIRECTIVES)
    + " }}{% endmacro %}\n"
)
_DICE = re.compile(r"\|\s*random\b|\blipsum\s*\(")


def opened_thought(markup: str) -> str:
    """The tag of the thought that the markup before a turn opens and does not close, such as
    `<think>`; empty if there is none."""
    tags = _THOUGHT.findall(markup)
    return tags[-1] if tags and not _CLOSING.search(tags[-1]) else ""


def with_fixed_clock(template: str) -> str:
    """The template with a macro in the place of the clock that it calls as `strftime_now`."""
    return _CLOCK_MACRO + template if _DATE.search(template) else template


def date_call(template: str) -> str | None:
    """The template's call of the clock; None if it does not call it."""
    call = _DATE.search(template)
    return call and call.group()


def dice_call(template: str) -> str | None:
    """What writes random text in a template; None if nothing does."""
    call = _DICE.search(template)
    return call and call.group()
