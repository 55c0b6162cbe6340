"""The bundled chat templates against renderings of the families' own, and against the one thing
that those do not do: keep what came before when a message is appended.

`tests/data/chat_templates/<name>.json` was made by running the family's own template, named under
`source` (those under `also_rendered_by` gave the same). Where the family rewrites a reply, the file
holds the text up to it (`prompt`) and the text after it (`after_reply`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

import turnrl
from turnrl.agent.chat import ChatFormat
from turnrl.agent.templates import find_bundled_family, fix_clock

TEMPLATES = {
    file.stem: file.read_text(encoding="utf-8")
    for file in sorted((Path(turnrl.__file__).parent / "agent" / "chat_templates").glob("*.jinja"))
}
FAMILIES: dict[str, list[str]] = json.loads(
    (Path(turnrl.__file__).parent / "agent" / "chat_templates" / "families.json").read_text("utf-8")
)
GOLDEN = {
    file.stem: json.loads(file.read_text(encoding="utf-8"))
    for file in sorted((Path(__file__).parent / "data" / "chat_templates").glob("*.json"))
}
CASES = [
    pytest.param(name, case, id=f"{name}: {case['name']}")
    for name, golden in GOLDEN.items()
    for case in golden["cases"]
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look it up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]
THINKING = [{}, {"enable_thinking": True}, {"enable_thinking": False}]

each_template = pytest.mark.parametrize("name", TEMPLATES)
contents = st.text(max_size=8) | st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "\n",
            "  ",
            "Paris",
            "{{ 1 }}",
            "{% for %}",
            "<|im_end|>",
            "<｜Assistant｜>",
            "<tool_call>{}</tool_call>",
            "<tool_response>",
            "</tool_response>",
        ]
    ),
    max_size=5,
).map("".join)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": contents}
    ),
    min_size=1,
    max_size=8,
)
system = st.lists(contents.map(lambda text: {"role": "system", "content": text}), max_size=1)


def render(name, conversation, tools=None, speak=True, **settings):
    texts, _ = render_jinja_template(
        conversations=[conversation],
        chat_template=fix_clock(TEMPLATES[name]),
        tools=tools,
        add_generation_prompt=speak,
        bos_token="<bos>",
        eos_token="<eos>",
        **settings,
    )
    return texts[0]


def recognised(template):
    return {name for name, parts in FAMILIES.items() if all(part in template for part in parts)}


def test_every_template_has_renderings_of_its_family_and_a_way_to_recognise_it():
    assert set(TEMPLATES) == set(GOLDEN) == set(FAMILIES) != set()


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_template_renders_an_exchange_as_its_family_does(name, case):
    text = render(
        name,
        case["messages"],
        case.get("tools"),
        case["add_generation_prompt"],
        **case.get("kwargs", {}),
    )
    if "text" in case:
        assert text == case["text"]
    else:
        replies = [m["content"] for m in case["messages"] if m["role"] == "assistant"]
        assert text == case["prompt"] + replies[0] + case["after_reply"]


@each_template
@pytest.mark.parametrize("thinking", THINKING, ids=["default", "thinking", "not thinking"])
@given(opening=system, rest=messages, tools=st.sampled_from([None, TOOLS]))
def test_appending_a_message_changes_nothing_before_it(name, thinking, opening, rest, tools):
    conversation = opening + rest
    whole = render(name, conversation, tools, **thinking)
    for i in range(len(opening) + 1, len(conversation)):
        if conversation[i]["role"] == "assistant":
            prompt = render(name, conversation[:i], tools, **thinking)
            assert whole.startswith(prompt + conversation[i]["content"])


@each_template
@given(reply=contents, rest=messages)
def test_a_reply_is_rendered_verbatim_between_its_prompt_and_the_rest(name, reply, rest):
    question = {"role": "user", "content": "Where?"}
    prompt = render(name, [question])
    # what follows a reply may depend on everything but the reply
    marked, whole = (
        render(name, [question, {"role": "assistant", "content": text}, *rest], speak=False)
        for text in ("", reply)
    )
    assert whole == prompt + reply + marked.removeprefix(prompt)


@each_template
def test_text_that_looks_like_a_template_or_a_thought_is_not_acted_on(name):
    text = " \n<think>{{ 7 * 7 }}</think>\n\n</think> {% raw %}<|im_end|>\n "
    user, reply = (
        {"role": role, "content": text.strip() if role == "user" else text}
        for role in ("user", "assistant")
    )
    assert render(name, [user, reply, user]).count(text) == 1
    assert render(name, [user, reply, user]).count(text.strip()) == 3


@each_template
@pytest.mark.parametrize(
    "extra",
    [
        {"tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {}}}]},
        {"reasoning_content": "I know."},
    ],
    ids=["tool_calls", "reasoning_content"],
)
def test_a_part_of_a_reply_outside_its_content_is_refused_rather_than_lost(name, extra):
    reply = {"role": "assistant", "content": "Paris", **extra}
    with pytest.raises(Exception, match="as part of content"):
        render(name, [{"role": "user", "content": "Where?"}, reply])


@each_template
def test_the_chat_format_of_rollouts_accepts_a_bundled_template(name):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATES[name]
    question = {"role": "user", "content": "Where?"}
    reply = {"role": "assistant", "content": "</think>\n\nParis"}
    observation = {"role": "user", "content": "It is."}
    chat = ChatFormat(tokenizer)
    appended = [
        *chat.encode_prompt([question]),
        *tokenizer(reply["content"], add_special_tokens=False)["input_ids"],
        *chat.encode_observation([observation], None),
    ]
    assert tokenizer.decode(appended) == render(name, [question, reply, observation])


@each_template
@pytest.mark.parametrize("system", [True, False], ids=["system", "no system"])
def test_every_template_but_deepseeks_describes_the_tools_once_before_the_question(name, system):
    opening = [{"role": "system", "content": "Be brief."}] * system
    conversation = [*opening, {"role": "user", "content": "Where?"}]
    text = render(name, conversation, TOOLS)
    told = int(name != "deepseek_r1")
    assert text.count("Look it up.") == told
    assert text.rindex("Where?") > text.find("Look it up.")
    rest = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": " about Rome"}]
    later = render(name, [*conversation, *rest, {"role": "user", "content": "Go on."}], TOOLS)
    assert later.count("Look it up.") == told
    assert later.count("about Rome") == later.count("Go on.") == 1


@each_template
def test_the_marks_of_one_family_match_no_other_family(name):
    marks = "".join(FAMILIES[name])
    assert recognised(marks) == {name}
    assert find_bundled_family(marks) == name


def test_bundled_templates_and_plain_chatml_are_not_flagged_for_replacement():
    chatml = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert recognised(chatml) == set()
    assert [name for name, template in TEMPLATES.items() if recognised(template)] == []
