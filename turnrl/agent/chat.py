"""Token-exact chat: the prompt is rendered once, then everything is appended.

The chat template is rendered on probes, which gives its markup around and between messages. Message
texts are tokenised on their own, with special tokens split, so no text can become a control token.
A template that rewrites history when a message is appended is refused. For model families whose own
template does so, turnrl brings one that does not (`chat_templates/`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import textwrap
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, cast, final

from turnrl.agent.messages import (
    SHOWN,
    fill_shape,
    iterate_texts,
    map_texts,
    message_shape,
    plain_text,
    shape_role,
    to_plain,
)
from turnrl.agent.templates import (
    find_control_tokens,
    find_open_thought,
    find_quoted_texts,
    is_bracketed,
    mark_texts,
    render,
    suggest_template,
)
from turnrl.agent.templates import read_template as read_template
from turnrl.plugin.errors import RecipeError
from turnrl.plugin.text import neutralize
from turnrl.types import Message, ToolSpec, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXTS = 65_536
"""Decoded texts of a few tokens that are cached."""
_SHAPES = 4_096
"""Markups of messages that are cached: messages with calls each have their own."""
_LONGEST = 8
"""The most tokens that one character may have, such as a sequence of emoji."""
_ROUNDS = 8
"""The fewest exchanges after which a template still has to render a conversation's beginning as it
did."""
_REPLY = "<think>turnrl thought</think>turnrl action"
_SPACE = "\u2003"
"""White space that no template writes."""
DECLARED_ENDS = "declared_end_ids"
"""Attribute of a policy's tokenizer: the end tokens that the model's configuration declares."""


def tool_schema(tool: ToolSpec) -> dict[str, object]:
    """A tool in the form that chat templates describe tools from (`tools=`)."""
    keys = ("name", "description", "parameters")
    return {"type": "function", "function": {key: getattr(tool, key) for key in keys}}


@final
class ChatFormat:
    """The format in which a policy's tokenizer writes a conversation.

    Args:
        tokenizer: The policy's tokenizer, with a chat template.
    Raises:
        RecipeError: If appending a message changes what the template rendered before.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._markup = lru_cache(_SHAPES)(self._find_markup)
        self._between = lru_cache(_SHAPES)(self._find_between)
        self._mark = cache(self._ids)
        self._lead = cache(partial(self._encode, "\0"))
        self._decoded = lru_cache(_TEXTS)(lambda ids: cast(str, tokenizer.decode(list(ids))))
        self._kept: set[tuple[tuple[str, ...], bool]] = set()  # openings that were checked
        self._trims: dict[str, bool] = {}  # whether the template strips the texts of a role
        self._markup(("user",), "[]")  # refuses a template that cannot be used at all
        self.control_tokens = tuple(sorted(self._find_control_tokens()))
        closings = {role: self._find_closing(role) for role in self._following}
        self._closings = {role: closing for role, closing in closings.items() if closing}
        self.end_of_turn = self._closings["user"][-1] if "user" in self._closings else None
        declared = getattr(tokenizer, DECLARED_ENDS, ())
        ends = {*declared, tokenizer.eos_token_id, *(ids[-1] for ids in self._closings.values())}
        self.end_ids: tuple[int, ...] = tuple(sorted(ends - {None}))

    def encode_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> tuple[int, ...]:
        """Ids of the rendered messages, up to where the assistant speaks.

        Args:
            messages: No text of theirs becomes a special token. Text from outside also has to be
                neutralised: a vocabulary may hold tags that are not marked as special.
            tools: Tools that the template itself describes.
        Raises:
            RecipeError: If the template refuses the messages, or changes their texts.
        """
        messages = self._plain(messages)
        return self._fill(self._opening(messages, tools), messages, False)

    def count_prompt_tokens(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], least: int
    ) -> int:
        """Number of tokens of a prompt (`encode_prompt`); if it is below `least`, any number below
        `least`. Only prompts of `least` bytes or more are tokenised: every token has a byte."""
        messages = self._plain(messages)
        markup = self._opening(messages, tools)
        texts = (*markup, *map(plain_text, messages))
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        return size if size < least else len(self._fill(markup, messages, False))

    def _opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[str]:
        """The markup around the messages of a prompt."""
        schemas = json.dumps([tool_schema(tool) for tool in tools], default=dict)
        return self._markup(tuple(map(message_shape, messages)), schemas)

    def _plain(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in one form. Calls and thoughts become part of the markup, so control tokens
        in them are neutralised."""
        made: list[Message] = []
        for message in map(to_plain, messages):
            safe = map_texts(message, lambda text: neutralize(text, (), self.control_tokens))
            made.append(cast(Message, {**safe, "content": message["content"]}))
        return made

    def encode_observation(self, messages: Sequence[Message], after: int | None) -> tuple[int, ...]:
        """Ids to append so that the policy reads the messages and speaks next.

        Args:
            messages: As for `encode_prompt`.
            after: The last sampled id. If it ended the turn and the template writes it before the
                first message, the ids begin after it, so that it is not repeated.
        """
        messages = self._plain(messages)
        markup = self._between(tuple(map(message_shape, messages)))
        ids = self._fill(markup, messages, True)
        before = self._mark(markup[0], goes_on=True)
        ended = after is not None and after in self.end_ids and after in before
        return ids[before.index(cast(int, after)) + 1 :] if ended else ids

    def open_thought(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """The tag of the thought that the prompt of these messages ends in, such as `<think>`;
        empty if the assistant begins outside any thought."""
        return find_open_thought(self._opening(self._plain(messages), tools)[-1])

    def reopened_thought(self, messages: Sequence[Message]) -> str:
        """The same at the end of messages that are appended; see `encode_observation`."""
        return find_open_thought(
            self._between(tuple(map(message_shape, self._plain(messages))))[-1]
        )

    def encode_turn(self, text: str, stop: Sequence[str], before: str = "user") -> tuple[int, ...]:
        """Ids of a turn as a model would write it: up to the first stop string, or else ended by
        the token that ends a turn.

        Args:
            text: The turn.
            stop: The stop strings.
            before: Role of the message that will follow: some templates end a turn by the token
                that opens the next message.
        Raises:
            RecipeError: If the text has no stop string, and no token ends a turn.
        """
        stops = [text.find(mark) + len(mark) for mark in stop if mark in text]
        ids = self._ids(text[: min(stops, default=None)], goes_on=True)
        ended = next((n for n, token in enumerate(ids) if token in self.end_ids), None)
        if ended is not None:
            return tuple(ids[: ended + 1])
        if stops:
            return tuple(ids)
        eos = self.tokenizer.eos_token_id
        closing = self._closings.get(before, () if eos is None else (cast(int, eos),))
        if not closing:
            raise self._template_error(
                "ends a turn by no token, and its tokenizer has no eos_token, so nothing can end a "
                "demonstrated turn. Set model.policy.chat_template to one that does."
            )
        return (*ids, *closing)

    def decode_turn(self, ids: Sequence[int]) -> str:
        """Text of a turn: decoded ids without the token that ended it."""
        written = ids[:-1] if ids and ids[-1] in self.end_ids else ids
        return cast(str, self.tokenizer.decode(list(written)))

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds. The last token of a character of several gets all of
        it."""
        texts: list[str] = []
        begin = done = 0  # tokens from `begin` are decoded together; those before `done` have texts
        for end in range(1, len(ids) + 1):
            whole = self._decoded(tuple(ids[begin:end]))
            if whole.endswith("\ufffd") and end < len(ids) and end - done < _LONGEST:
                texts.append("")  # the character may go on
                continue
            texts.append(whole.removeprefix(self._decoded(tuple(ids[begin:done]))))
            # decode the last token again: some decoders drop the space before the first token
            begin, done = end - 1, end
        return texts

    def text_before_turns(self, trajectory: Trajectory) -> list[str]:
        """The text that the policy read right before each turn, with the template's markup, as
        lines to print; empty if a `MessageSampler` wrote the turns."""
        turns = range(len(trajectory.turns)) if trajectory.samples else ()
        read = (self.tokenizer.decode(list(trajectory.read_before(k))) for k in turns)
        return [textwrap.indent(cast(str, text).strip(), "   > ") for text in read]

    def neutralize(self, text: str, tags: Sequence[str]) -> str:
        """`text` with tags and control tokens neutralised; see `turnrl.plugin.text.neutralize`."""
        return neutralize(text, tags, self.control_tokens)

    def count_tokens(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(self._ids(text, control=False))

    def truncate(self, text: str, tokens: int) -> str:
        """At most `tokens` tokens of `text`, from its beginning."""
        # tokenising megabytes, only to keep a few hundred tokens, would be slow
        head = text[: tokens * 32]
        ids = self._ids(head, control=False)
        if len(ids) <= tokens and len(head) == len(text):
            return text
        return cast(str, self.tokenizer.decode(ids[:tokens])).rstrip("\ufffd")

    def sanitize(self, text: str, tags: Sequence[str], tokens: int) -> str:
        """`text` neutralised, and at most `tokens` tokens long; see `neutralize` and `truncate`."""
        safe, limit = self.neutralize(self.truncate(text, tokens), tags), tokens
        # making a text inert may lengthen it, and a cut may expose a tag like `<tools`: inert comes
        # last. It then changes only the last word, so one or two cuts are enough
        while limit and self.count_tokens(safe) > tokens:
            safe = self.neutralize(self.truncate(safe, limit), tags)
            limit -= max(1, self.count_tokens(safe) - tokens)
        return safe

    def advice(self, does: str) -> str:
        """Advice to take another template, which `does` something that this one does not."""
        return suggest_template(self._source, f"Give one that {does} in model.policy.chat_template")

    def _fill(self, markup: list[str], texts: Sequence[Message], goes_on: bool) -> tuple[int, ...]:
        ids = [*self._mark(markup[0], goes_on=goes_on)]
        for message, after in zip(texts, markup[1:], strict=True):
            ids += self._ids(self._rendered_text(message), control=False, goes_on=True)
            ids += self._mark(after, goes_on=True)
        return tuple(ids)

    def _find_markup(self, roles: tuple[str, ...], schemas: str) -> list[str]:
        """The markup that the template writes around the messages that open a conversation, which
        have these roles or shapes (`message_shape`)."""
        tools = json.loads(schemas) or None
        opening = self._render(_pad_texts(roles), tools)
        self._check_rendering(opening, roles, tools)
        markup = self._split(opening, roles)
        if (kind := (roles, tools is None)) not in self._kept:
            self._check_history(opening, roles, tools)
            self._kept.add(kind)
        return markup

    def _find_between(self, roles: tuple[str, ...]) -> list[str]:
        """The markup that the template writes from one assistant's text to the next, around the
        messages between them."""
        user: Message = {"role": "user", "content": "turnrl question"}
        exchange: list[Message] = [{"role": "assistant", "content": _REPLY}, *_pad_texts(roles)]
        prompt, once, twice = (self._render([user, *exchange * times]) for times in range(3))
        between = once.removeprefix(prompt + _REPLY)
        for text, wanted in ((once, prompt + _REPLY), (twice, prompt + (_REPLY + between) * 2)):
            if not text.startswith(wanted):
                self._refuse(text, wanted)
        return self._split(between, roles)

    def _check_rendering(
        self, opening: str, shapes: tuple[str, ...], tools: list[Any] | None
    ) -> None:
        """Refuse a template that leaves out a call or a thought of a message, or rewrites it."""
        messages = _pad_texts(shapes)
        for number, message in enumerate(messages):
            for name in (name for name in SHOWN if name in message):
                bare = cast(Message, {key: v for key, v in message.items() if key != name})
                without = self._render([*messages[:number], bare, *messages[number + 1 :]], tools)
                for text in map(str.strip, iterate_texts(_visible_to_policy(message, name))):
                    forms = {
                        text,
                        json.dumps(text)[1:-1],
                        json.dumps(text, ensure_ascii=False)[1:-1],
                    }
                    if all(opening.count(form) <= without.count(form) for form in forms):
                        raise self._template_error(
                            f"leaves out or rewrites {name} of a message of role "
                            f"{message['role']} ({text!r:.60}). Write it into the message's text, "
                            "or give a template that takes it in model.policy.chat_template."
                        )

    def _check_history(self, opening: str, roles: tuple[str, ...], tools: list[Any] | None) -> None:
        """Refuse a template that renders an opening, or what came after it, otherwise once more
        messages follow: after many exchanges, after results of tools, or after a reply with a text
        that the template looks for."""
        texts = find_quoted_texts(self._source)
        quoted = [f"turnrl{text}action" for text in (*texts, "thought".join(texts))]
        many = [_REPLY] * _ROUNDS
        following = [role for role in self._following if role != "system"]

        def is_kept(replies: Sequence[str], roles_after: Sequence[str]) -> bool:
            """False if the template refuses such a conversation."""
            messages, wanted = _pad_texts(roles), opening
            for reply, role in zip(replies, itertools.cycle(roles_after), strict=False):
                (message,), (before, after) = _pad_texts((role,)), self._between((role,))
                messages += [{"role": "assistant", "content": reply}, message]
                wanted += reply + before + self._rendered_text(message) + after
            try:
                text = self._render(messages, tools)
            except RecipeError:
                return False
            if not text.startswith(wanted):
                self._refuse(text, wanted)
            return True

        if not is_kept(many + quoted, following):
            _ = is_kept(many, following) or is_kept(many, ["user"])
            for reply in quoted:
                is_kept([reply], ["user"])

    def _find_control_tokens(self) -> set[str]:
        """The vocabulary's special tokens, and whatever the template uses as one."""
        written = [self._source]
        with contextlib.suppress(RecipeError):  # it may take no system message
            written += self._markup(("system", "user"), "[]")
        for role in self._following:
            written += self._between((role,))
        known = self.tokenizer.added_tokens_decoder.values()
        names = {
            *map(str, self.tokenizer.all_special_tokens),
            *(str(t) for t in known if t.special),
        }
        return {*filter(is_bracketed, names), *find_control_tokens("\n".join(written))}

    def _find_closing(self, role: str) -> tuple[int, ...]:
        """The ids that end a turn if a message of this role follows it: the markup before that
        message, up to its first control token. Empty if it does not begin with one."""
        ids = self._mark(self._between((role,))[0], goes_on=True)
        texts = [self._decoded((token,)).strip() for token in ids]
        at = next((n for n, text in enumerate(texts) if text), 0)
        return tuple(ids[: at + 1]) if texts and texts[at] in self.control_tokens else ()

    @cached_property
    def _following(self) -> list[str]:
        """Roles of messages that the template writes after the assistant's."""
        roles = ["user"]
        for role in ("tool", "system"):
            with contextlib.suppress(RecipeError):
                self._between((role,))
                roles.append(role)
        return roles

    @property
    def _source(self) -> str:
        own = self.tokenizer.chat_template
        return "\n".join(own.values()) if isinstance(own, dict) else str(own)

    def _refuse(self, text: str, wanted: str) -> None:
        same = next((i for i, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b), 0)
        what = "is not prefix-preserving: appending a message changes what came before"
        change = f"{text[same : same + 40]!r} where {wanted[same : same + 40]!r} was"
        raise self._template_error(f"{what} (it renders {change}). {self.advice('keeps it')}")

    def _advice_on(self, roles: Sequence[str]) -> str:
        """Advice on a template that does not take messages of these roles."""
        ways = {
            "tool": " Or take a segmenter whose results are the user's, such as TwoTurn.",
            "system": " Or do without a system message (instructions of the segmenter).",
        }
        otherwise = (way for role, way in ways.items() if role in roles)
        return self.advice("takes them") + "".join(otherwise)

    def _template_error(self, what: str) -> RecipeError:
        return RecipeError(f"the chat template of {self.tokenizer.name_or_path!r} {what}")

    def _split(self, text: str, roles: tuple[str, ...]) -> list[str]:
        """The markup around the texts of `_pad_texts` messages; it notes whose texts are
        stripped."""
        pieces = []
        for shape, message in zip(roles, _mark_shapes(roles), strict=True):
            if not (content := plain_text(message)):  # calls alone: all of it is markup
                pieces.append("")
                self._trims[shape] = False
                continue
            before, mark, text = text.partition(content)
            if not mark or mark in text:
                kinds = ", ".join(map(shape_role, roles))
                what = f"does not write the text of each message of {kinds} once"
                raise self._template_error(f"{what}. {self._advice_on(roles)}")
            self._trims[shape] = not before.endswith(_SPACE)
            pieces.append(before.removesuffix(_SPACE))
            text = text.removeprefix(_SPACE)
        return [*pieces, text]

    def _rendered_text(self, message: Message) -> str:
        """The text of a message as the template writes it."""
        text = plain_text(message)
        return text.strip() if self._trims[message_shape(message)] else text

    def _render(self, messages: Sequence[Message], tools: list[Any] | None = None) -> str:
        try:
            return render(self.tokenizer, messages, tools)
        except Exception as error:
            roles = [message["role"] for message in messages]
            what = f"fails on messages of {', '.join(roles)}: {str(error).rstrip('.')}"
            raise self._template_error(f"{what}. {self._advice_on(roles)}") from error

    def _ids(self, text: str, control: bool = True, goes_on: bool = False) -> list[int]:
        if goes_on:
            # some vocabularies put a space before any text, which is wrong in the middle of a text.
            # no merge contains the character \0
            ids, lead = self._encode("\0" + text, control), self._lead(control)
            if ids[: len(lead)] == lead:
                return ids[len(lead) :]
        return self._encode(text, control)

    def _encode(self, text: str, control: bool) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate is not text
        # verbose: it warns of texts beyond the model's window, which turnrl cuts or leaves out
        options = {
            "add_special_tokens": False,
            "split_special_tokens": not control,
            "verbose": False,
        }
        return cast("list[int]", self.tokenizer(text, **options)["input_ids"])


def _pad_texts(roles: Sequence[str]) -> list[Message]:
    """Messages to render, with white space around their texts, which a template may strip."""
    texts = (text and f"{_SPACE}{text}{_SPACE}" for text in map(plain_text, _mark_shapes(roles)))
    return [fill_shape(role, text) for role, text in zip(roles, texts, strict=True)]


def _mark_shapes(shapes: Sequence[str]) -> list[Message]:
    """Messages of these shapes, with texts that can be found again."""
    texts = map(plain_text, mark_texts(shapes))
    return [fill_shape(shape, text) for shape, text in zip(shapes, texts, strict=True)]


def _visible_to_policy(message: Message, name: str) -> object:
    """What a policy has to read of a field: the names and arguments of calls, or the thought."""
    if name == "tool_calls":
        return [call["function"] for call in message["tool_calls"]]
    return message["reasoning_content"]
