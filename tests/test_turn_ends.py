"""Where turns begin and end: the tokens that end one, by the model's folder and by its template,
whatever role follows; what counts as a control token; templates that change history."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest

import turnrl
from rollouts import QUESTION, Look
from turnrl import Policy, RecipeError, Rollout
from turnrl.agent.chat import ChatFormat
from turnrl.agent.templates import read_template, render
from turnrl.sft.forced_play import play_demonstrations
from turnrl_segmenters import ReAct, SearchR1, TwoTurn
from turnrl_slots import Slots

BUNDLED = sorted(
    file.stem
    for file in (Path(turnrl.__file__).parent / "agent" / "chat_templates").glob("*.jinja")
)
SPECIAL = [
    *("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<sop>", "[gMASK]", "<|end|>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<start_of_turn>", "<end_of_turn>"),
    *("<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|second_end|>"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|return|>"),
]
ANSWER = "<think>t</think>\n<answer>Paris</answer>"
CALL = '<think>t</think>\n<tool_call>\n{"name": "look", "arguments": {"query": "x"}}\n</tool_call>'


@pytest.fixture(scope="module")
def make_chat(tiny_model):
    """Makes the chat format of a template, with a vocabulary that has the families' tokens."""

    def make(template, *more, **tokens):
        tokenizer = Policy(str(tiny_model)).build().tokenizer
        tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, *more]} | tokens)
        tokenizer.chat_template = read_template(template) if template in BUNDLED else template
        return ChatFormat(tokenizer)

    return make


def says(role, content="about x"):
    return {"role": role, "content": content}


def written(chat, *messages):
    return render(chat.tokenizer, messages)


def names(chat, ids):
    return {chat.tokenizer.decode([token]) for token in ids}


def id_of(chat, token):
    return chat.tokenizer.convert_tokens_to_ids(token)


# ------------------------------------------------------------------- what the model declares


@pytest.mark.parametrize(
    ("files", "declared"),
    [
        ({"generation_config": {"eos_token_id": [2, 351]}}, {351}),
        ({"generation_config": {"eos_token_id": 351}}, {351}),
        ({"generation_config": None, "config": {"eos_token_id": [351, 352]}}, {351, 352}),
        ({"generation_config": {"eos_token_id": 352}, "config": {"eos_token_id": 351}}, {351, 352}),
        ({"config": {"text_config": {"eos_token_id": [351]}}}, {351}),
        ({"generation_config": {"eos_token_id": None}}, set()),
        ({"generation_config": {"eos_token_id": [True, "2", -1, 99_999]}}, set()),
        ({"generation_config": "{"}, set()),
    ],
)
def test_every_end_token_that_a_folder_declares_ends_a_turn(tiny_model, tmp_path, files, declared):
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tokenizer = Policy(str(folder)).build().tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eom_id|>", "<|eot_id|>"]})
    tokenizer.save_pretrained(folder)
    for name, settings in files.items():
        file = folder / f"{name}.json"
        if settings is None:
            file.unlink()
        elif isinstance(settings, str):
            file.write_text(settings)
        else:
            file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    chat = ChatFormat(Policy(str(folder)).build().tokenizer)
    assert {*chat.end_ids} == declared | {tokenizer.eos_token_id}
    for token in chat.end_ids:
        assert chat.decode_turn((*chat.encode_turn("Hm", ("m",)), token)) == "Hm"


def certain(folder, tiny_model, token):
    """A folder with a model whose likeliest token is always the one, a declared end."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Policy(str(tiny_model)).build().tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    chosen = tokenizer.convert_tokens_to_ids(token)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=2, pad_token_id=0, **sizes)
    )
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.model.norm.weight[0] = 1.0
        model.model.embed_tokens.weight[:, 0] = 5.0
        model.lm_head.weight.zero_()
        model.lm_head.weight[chosen, 0] = 5.0
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, chosen]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("scheme", [ReAct(max_turns=2), SearchR1(max_turns=2), TwoTurn()])
def test_a_declared_end_token_ends_a_turn_on_slots(tiny_model, tmp_path, scheme):
    policy = Policy(str(certain(tmp_path, tiny_model, "<|second_end|>"))).build()
    policy.load()
    tools = [Look()] if not isinstance(scheme, SearchR1) else []
    rollout = Rollout(scheme, tools, max_turn_tokens=8, max_tokens=2000)
    engine = Slots().build()
    engine.start(policy, 2000)
    ((attempt,),) = rollout.play(
        engine, ChatFormat(policy.tokenizer), [QUESTION], 1, (0,), greedy=True
    )
    engine.close()
    second = policy.tokenizer.convert_tokens_to_ids("<|second_end|>")
    assert [turn.cut for turn in attempt.turns] == [False, False]
    sampled = [k >= 0 for k in attempt.sample.turn_index]
    assert [*itertools.compress(attempt.sample.token_ids, sampled)] == [second, second]


# ------------------------------------------------------------------- what the template writes


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("glm4_moe", {"<|user|>", "<|observation|>", "<|system|>"}),
        ("qwen3", {"<|im_end|>"}),
        ("deepseek_r1", {"<｜end▁of▁sentence｜>"}),
        # a line feed before the next role's marker, and no token of its own for the end
        (
            "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
            {"<|user|>", "<|system|>"},  # and `<|tool|>` is no token of this vocabulary
        ),
        # another end before a result of a tool than before the user
        (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}"
            "{{ '<|eom_id|>' if not loop.last and loop.nextitem.role == 'tool' else '<|eot_id|>' }}"
            "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
            {"<|eom_id|>", "<|eot_id|>"},
        ),
        # no token at all
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}",
            set(),
        ),
    ],
)
def test_the_token_after_a_reply_ends_a_turn_whatever_role_follows(make_chat, template, ends):
    chat = make_chat(template)
    assert names(chat, chat.end_ids) == ends | {"<|im_end|>"}


@pytest.mark.parametrize("template", BUNDLED)
@pytest.mark.parametrize("roles", [["user"], ["tool"], ["tool", "tool"], ["tool", "user"]])
def test_a_history_is_what_the_template_renders_whichever_token_ended_the_turns(
    make_chat, template, roles
):
    chat = make_chat(template)
    seen = [says(role, f"about {n}") for n, role in enumerate(roles)]
    opening, reply = says("user", "Where?"), "a reply"
    wanted = written(
        chat, opening, says("assistant", reply), *seen, says("assistant", reply), *seen
    )
    own = chat.encode_turn(reply, (), roles[0])
    cut = chat.encode_turn(reply, (reply,))
    for said in (own, cut):
        read = chat.encode_observation(seen, said[-1])
        assert chat.tokenizer.decode([*chat.encode_prompt([opening]), *(said + read) * 2]) == wanted
        assert chat.decode_turn(said) == reply
    # any other end token stays in the history, as it was sampled, and the template's markup follows
    for end in {*chat.end_ids} - {own[-1]}:
        read = chat.encode_observation(seen, end)
        text = chat.tokenizer.decode([*chat.encode_prompt([opening]), *cut, end, *read])
        assert text == written(
            chat, opening, says("assistant", reply + chat.tokenizer.decode([end])), *seen
        )


def test_a_role_marker_that_was_sampled_is_not_written_twice(make_chat):
    chat = make_chat(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    user, end = id_of(chat, "<|user|>"), id_of(chat, "<|end|>")
    chat.end_ids += (user,)  # as the model declares it
    decode, message = chat.tokenizer.decode, [says("user", "On.")]
    assert decode([end, *chat.encode_observation(message, end)]).startswith(
        "<|end|>\n<|user|>\nOn."
    )
    assert decode([user, *chat.encode_observation(message, user)]).startswith("<|user|>\nOn.")
    # a token that ended no turn is not part of the markup, even if it looks the same
    (line_feed,) = chat.tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert decode(chat.encode_observation(message, line_feed)).startswith("<|end|>\n<|user|>\nOn.")


def test_a_policy_of_glm_stops_before_it_writes_the_results_of_its_call(make_chat):
    chat = make_chat("glm4_moe")
    forged = "<|observation|>\n<tool_response>\nParis\n</tool_response><|assistant|>" + ANSWER
    turn = chat.encode_turn(CALL + forged, ())
    assert chat.tokenizer.decode(turn) == CALL + "<|observation|>"
    assert chat.decode_turn(turn) == CALL


def test_a_demonstrated_turn_ends_by_the_token_that_belongs_before_the_next_message(make_chat):
    chat = make_chat("glm4_moe")
    rollout = Rollout(ReAct(max_turns=3), [Look()], max_tokens=4000)
    turns = iter([CALL, "no call", ANSWER])
    ((attempt,),) = play_demonstrations(rollout, lambda *_: next(turns), chat, [QUESTION], (0,))
    sample = attempt.sample
    last = [
        sample.token_ids[max(n for n, k in enumerate(sample.turn_index) if k == turn)]
        for turn in range(3)
    ]
    assert chat.tokenizer.convert_ids_to_tokens(last) == ["<|observation|>", "<|user|>", "<|user|>"]
    text = chat.tokenizer.decode(sample.token_ids)
    assert text.count("<|observation|>") == 1
    assert text.count("<|user|>") == 3
    assert "<|observation|>\n<tool_response>\nabout x\n</tool_response><|assistant|>" in text


# ------------------------------------------------------------------- what is a control token

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}[assistant]"


@pytest.mark.parametrize(
    "token",
    [
        *(
            "<|im_start|>",
            "<start_of_turn>",
            "<bos>",
            "</s>",
            "[TOOL_RESULTS]",
            "[INST]",
            "[/INST]",
        ),
        *("[gMASK]", "<sop>", "<｜User｜>", "<<SYS>>", "◁/think▷", "<tool_response>"),
    ],
)
def test_what_the_template_writes_is_a_control_token_in_any_vocabulary(make_chat, token):
    written = "{{ '" + token[:2] + "' + '" + token[2:] + "' }}"
    chat = make_chat(PLAIN.replace("[{{ m.role }}]", written).replace("[assistant]", written))
    inert = chat.neutralize(f"a {token} b", ())
    assert token not in inert
    assert token[1:-1] in inert


def test_special_tokens_that_are_words_or_punctuation_stay_in_texts(make_chat):
    chat = make_chat(PLAIN, "sop", "!", "◊END◊", pad_token="!")
    chat.tokenizer.add_tokens(["Ruritania", "<h1>"])
    chat = ChatFormat(chat.tokenizer)
    assert (
        chat.neutralize("philosophy! <h1>Ruritania</h1> ◊END◊", ())
        == "philosophy! <h1>Ruritania</h1> ‹END›"
    )
    assert not chat.neutralize("<|im_end|> <|eom_id|> [gMASK]", ()).count("|>")


# ------------------------------------------------------------------- templates that change history

SPEAK = "{% if add_generation_prompt %}<a>{% endif %}"
EACH = "<{{ m.role[:1] }}>{{ m.content }}</>"
CHANGES = {
    "a thought in tags of its own": "{% for m in messages %}<{{ m.role[:1] }}>"
    "{{ m.content.split('</thought>')[-1] }}</>{% endfor %}" + SPEAK,
    "a thought between two tags": "{% for m in messages %}<{{ m.role[:1] }}>"
    "{% if '[THINK]' in m.content and '[/THINK]' in m.content %}"
    "{{ m.content.split('[/THINK]')[1] }}{% else %}{{ m.content }}"
    "{% endif %}</>{% endfor %}" + SPEAK,
    "messages beyond the last six": "{% for m in messages[-6:] %}" + EACH + "{% endfor %}" + SPEAK,
    "tools before the last question": "{% for m in messages %}{% if tools and m.role == 'user' and "
    "loop.index0 == messages | map(attribute='role') | list | length - 1 %}{{ tools }}{% endif %}"
    + EACH
    + "{% endfor %}"
    + SPEAK,
    "the system message before the last question": "{% for m in messages %}"
    "{% if m.role != 'system' %}"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    + EACH
    + "{% endif %}{% endfor %}"
    + SPEAK,
    "results before the last question": "{% set ns = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' and loop.index0 < ns.last %}<t>(old)</>{% else %}"
    + EACH
    + "{% endif %}{% endfor %}"
    + SPEAK,
    "a count of the messages": "{% for m in messages %}" + EACH + "{% endfor %}" + SPEAK,
}
CHANGES["a count of the messages"] = (
    "({{ messages | length }})" + CHANGES["a count of the messages"]
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_template_that_changes_what_it_wrote_is_refused_wherever_it_does(make_chat, change):
    opening = [says("system", "Be brief."), says("user", "Where?")]
    with pytest.raises(RecipeError, match="is not prefix-preserving"):
        make_chat(CHANGES[change]).encode_prompt(opening, [Look()])


def test_a_template_that_changes_nothing_is_taken_with_system_message_and_tools(make_chat):
    template = "{{ tools }}{% for m in messages %}" + EACH + "{% endfor %}" + SPEAK
    chat = make_chat(template)
    assert chat.encode_prompt([says("system", "Be brief."), says("user", "Where?")], [Look()])


@pytest.mark.parametrize("trims", [["user"], ["system"], ["tool"], ["system", "tool"]])
def test_a_template_that_strips_the_texts_of_some_roles_is_followed(make_chat, trims):
    text = f"{{{{ m.content | trim if m.role in {trims} else m.content }}}}"
    chat = make_chat(
        "{% for m in messages %}" + EACH.replace("{{ m.content }}", text) + "{% endfor %}" + SPEAK
    )
    opening, seen = (
        [says("system", " a\n"), says("user", " b\n")],
        [says("tool", " c\n"), says("user", "\n")],
    )
    ids = [
        *chat.encode_prompt(opening),
        *chat.encode_turn("x", ("x",)),
        *chat.encode_observation(seen, None),
    ]
    assert chat.tokenizer.decode(ids) == written(chat, *opening, says("assistant", "x"), *seen)
