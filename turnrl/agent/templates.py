"""Chat templates: the bundled ones, and whatever a template does besides writing messages: it
writes control tokens, and may look for texts, open a thought, or read the clock.

A prompt has to be the same in training, after a resume and in `ask`, on whatever day they run. So
templates are rendered with a clock that stands still.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from turnrl.plugin.errors import RecipeError, suggest_name
from turnrl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BUNDLED = Path(__file__).parent / "chat_templates"

CLOCK = datetime(2026, 1, 1)
"""The time that every chat template reads."""

_TAG = r"[<\[◁][^<>\[\]◁▷\s]*(?:{})[^<>\[\]◁▷\s]* ?[>\]▷]"
_THOUGHT = re.compile(
    _TAG.format(
        "think|thought|reason|rationale|analysis|scratch|reflect|reflex|plan|cot|monologue|ponder"
        "|deliberat|consider|brainstorm|cogitat|思考"
    )
    + r"|<\|channel\|?>(?:analysis|thought)|<\|open\|>think|<channel\|>|<\|end\|>"
    + r"|(?:thoughts?|thinking|reasoning):?(?=\s*\Z)",
    re.IGNORECASE,
)
"""Tags around thoughts, as model families write them; `<think>` most of all."""
_CLOSING = re.compile(r"/|(?<![a-z])(?:end|no)|off\b|<channel\|>", re.IGNORECASE)

_MARKUP = re.compile(
    r"<[|｜]?/?\w[^<>\s]{0,60}>|<<?/?[A-Z]+>>?|\[/?(?:[A-Z][A-Z_]+|[gs]MASK)\]|◁[^◁▷\s]{1,60}▷"
)
"""Control tokens as model families write them: `<|im_end|>`, `<bos>`, `[INST]`, `<<SYS>>`."""
_BRACKETED = re.compile(r"[▁\s]*[^\w\s▁].*\w.*[^\w\s▁]", re.DOTALL)

_DATE = re.compile(r"strftime_now\s*\([^)]*\)|strftime_now(?!\s*\(|\s+is\b)")
"""A call of the clock, or its mere name, under which a template may call it later."""
_DIRECTIVES = [
    f"%{flag}{letter}" for flag in ("-", "") for letter in "aAbBcdeDfFHIjmMpRSTuUwWxXyYzZ"
]
# the line feed at its end is not rendered, and keeps the template's first line a first line
_CLOCK_MACRO = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace({form!r}, {CLOCK.strftime(form)!r})" for form in _DIRECTIVES)
    + " }}{% endmacro %}\n"
)


def read_template(name: str) -> str:
    """The text of a chat template: a file of yours, or one that comes with turnrl.

    Args:
        name: A file, or the name of a family such as `qwen3`.
    Raises:
        RecipeError: If there is no such file and no such family.
    """
    for file in (Path(name).expanduser(), _BUNDLED / f"{name}.jinja"):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    hint = f"{suggest_name(name, _bundled_names())} Give a file, or one that comes with turnrl"
    raise RecipeError(
        f"no file at model.policy.chat_template {name!r}.{hint}: {', '.join(_bundled_names())}."
    )


def find_bundled_family(template: str) -> str | None:
    """The bundled template to use in place of a model family's own, which its text identifies."""
    families: dict[str, list[str]] = json.loads((_BUNDLED / "families.json").read_text("utf-8"))
    matches = (name for name, marks in families.items() if all(m in template for m in marks))
    return next(matches, None)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: list[Any] | None = None,
) -> str:
    """Messages as the chat template writes them, up to where the assistant speaks.

    Args:
        tokenizer: It has the template and the special tokens.
        messages: The conversation.
        tools: Schemas of tools to describe.
    """
    options: dict[str, Any] = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
    options["chat_template"] = fix_clock(tokenizer.get_chat_template(None, tools))
    return cast(str, tokenizer.apply_chat_template(cast(Any, list(messages)), **options))


def suggest_template(template: str, advice: str) -> str:
    """Advice to replace a template by the bundled one of its family, or if there is none, by one
    that does what `advice` says (without a full stop)."""
    name = find_bundled_family(template) or ("qwen3" if "<|im_start|>" in template else None)
    if name is not None and read_template(name) != template:
        return f"Set model.policy.chat_template: {name}, which comes with turnrl."
    return f"{advice}. These come with turnrl: {', '.join(_bundled_names())}."


def _bundled_names() -> list[str]:
    return sorted(file.stem for file in _BUNDLED.glob("*.jinja"))


def mark_texts(roles: Sequence[str]) -> list[Message]:
    """Messages whose texts can be found again in the rendered conversation, unless the template
    rewrites or encodes them."""
    return [{"role": role, "content": f'turnrl "text"\n{i}.'} for i, role in enumerate(roles)]


def find_open_thought(markup: str) -> str:
    """The tag of the thought that the markup before a turn opens and does not close, such as
    `<think>`; empty if there is none."""
    tags = _THOUGHT.findall(markup)
    return tags[-1] if tags and not _CLOSING.search(tags[-1]) else ""


def find_control_tokens(text: str) -> list[str]:
    """The control tokens that stand in a template, or in what it writes, whether or not the
    vocabulary has a token for them."""
    return _MARKUP.findall(text)


def is_bracketed(token: str) -> bool:
    """True of `<|im_end|>` and `[gMASK]`, and False of special tokens that are words, punctuation
    or white space, which ordinary texts contain."""
    return _BRACKETED.fullmatch(token) is not None


def find_quoted_texts(template: str) -> list[str]:
    """The texts in quotes in a template, each once. What it looks for in a message, to take it out
    or to act on it, is among them."""
    from jinja2 import Environment, TemplateError  # `import turnrl` stays light

    with contextlib.suppress(TemplateError, ValueError, SyntaxError):
        tokens = Environment().lex(template)
        return [
            *dict.fromkeys(ast.literal_eval(text) for _, kind, text in tokens if kind == "string")
        ]
    return []


def fix_clock(template: str) -> str:
    """The template with a macro in the place of the clock that it calls as `strftime_now`."""
    return _CLOCK_MACRO + template if _DATE.search(template) else template


def find_clock_call(template: str) -> str | None:
    """The template's call of the clock; None if it does not call it."""
    call = _DATE.search(template)
    return call and call.group()
