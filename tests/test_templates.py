"""What a chat template does beyond writing messages: it opens a thought, which the segmenter has to
know, or it calls the clock."""

import pytest

from conftest import CHATML
from players.scripted import FunctionPlayer
from rollouts import Brackets, Look
from turnrl import Policy, RecipeError, Rollout
from turnrl.agent.chat import ChatFormat
from turnrl.agent.templates import find_open_thought, read_template
from turnrl_segmenters import Action, ReAct, SearchR1, TwoTurn

WITH_TOOLS = read_template("qwen3")


class Search(Look):
    name = "search"


class Step(Look):
    name = "step"


@pytest.fixture
def chat(tiny_model):
    """Makes the chat format of a template."""

    def make(template):
        tokenizer = Policy(str(tiny_model)).build().tokenizer
        tokenizer.chat_template = template
        return ChatFormat(tokenizer)

    return make


def opening(markup, template=WITH_TOOLS):
    """A template whose assistant speaks after this markup."""
    return template.replace("<|im_start|>assistant\\n", f"<|im_start|>assistant\\n{markup}")


def tools_of(segmenter):
    return [Step()] if isinstance(segmenter, Action) else [Search()]


# ------------------------------------------------------------------- thoughts


@pytest.mark.parametrize(
    ("markup", "tag"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        ("<|START_THINKING|>", "<|START_THINKING|>"),
        ("<|START_THINKING|><|END_THINKING|>", ""),
        ("[/INST][THINK]", "[THINK]"),
        ("◁think▷", "◁think▷"),
        ("<start_of_turn>model\n<unused94>thought\n", "thought"),
        ("<|im_start|>assistant\nThought:", "Thought:"),
        ("Think without reasoning:\n<|im_start|>assistant\n", ""),
        ("<start_of_turn>model\n<reasoning>\nLet me see", "<reasoning>"),
        ("<|turn>model\n<|channel>thought\n", "<|channel>thought"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "<|channel|>analysis"),
        ("/no_think<|im_end|>\n<|im_start|>assistant\n", ""),
    ],
)
def test_the_thought_that_a_template_leaves_open_is_known_by_its_tag(markup, tag):
    assert find_open_thought(markup) == tag


def test_a_template_that_opens_the_thought_is_refused_by_a_scheme_that_does_not_know(chat):
    for segmenter in (ReAct(), SearchR1(), TwoTurn(), Action(form="text")):
        rollout = Rollout(segmenter, tools_of(segmenter))
        with pytest.raises(RecipeError, match=r"opens a thought with <think> .* think: opened"):
            rollout.check(chat(read_template("qwq")))


def test_a_scheme_of_opened_thoughts_needs_a_template_that_opens_them(chat):
    closed = opening("<think>\\n\\n</think>\\n\\n")
    for kind in (ReAct, SearchR1, Action):
        rollout = Rollout(kind(think="opened"), tools_of(kind()))
        rollout.check(chat(read_template("qwen3_thinking")))
        for template in (closed, opening("[THINK]")):
            with pytest.raises(RecipeError, match=r"begin inside <think>.*Leave out think: opened"):
                rollout.check(chat(template))
        Rollout(kind(), tools_of(kind())).check(chat(closed))


def test_a_thought_that_opens_only_beside_tools_or_after_a_result_counts(chat):
    rollout = Rollout(ReAct(), [Search()])
    speak = "{{- speak if add_generation_prompt }}"
    told = "speak + ('<think>' if {} else '') + message.content"
    # what is appended is rendered without tools, so the first would not be followed either
    fits = "is not prefix-preserving", "<think> at the end of messages of role tool"
    for when, message in zip(("tools", "not loop.first"), fits, strict=True):
        asked = "{{- '<think>' if add_generation_prompt and CASE }}".replace(
            "CASE", when.replace("not loop.first", "messages[-1].role == 'tool'")
        )
        template = WITH_TOOLS.replace(speak, speak + asked)
        earlier = when.replace("not loop.first", "loop.index > 1 and loop.previtem.role == 'tool'")
        template = template.replace("speak + message.content", told.format(earlier))
        with pytest.raises(RecipeError, match=message):
            rollout.check(chat(template))
        Rollout(SearchR1(), [Search()]).check(chat(template))  # whose prompts open none


def test_a_scheme_of_another_package_says_itself_which_thought_it_reads(chat):
    scheme = Brackets()
    template = opening("[THINK]")
    with pytest.raises(RecipeError, match=r"opened_thought = '\[THINK\]' in its class"):
        Rollout(scheme, [Look()]).check(chat(template))
    for opens in ("[THINK]", None):
        scheme.opened_thought = opens
        Rollout(scheme, [Look()]).check(chat(template))


def test_a_player_is_warned_of_a_template_that_opens_the_thought(chat, caplog):
    player = FunctionPlayer(None)
    Rollout(player=player).check(chat(CHATML))
    assert not caplog.text
    Rollout(player=player).check(chat(read_template("qwq")))
    assert "opens a thought with <think> at the end of a prompt" in caplog.text


# ------------------------------------------------------------------- the clock


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("strftime_now('%d %b %Y')", "01 Jan 2026"),
        ('strftime_now("%-d %B %y, %A")', "1 January 26, Thursday"),
        ("'' }}{% set now = strftime_now %}{{ now('%Y')", "2026"),
    ],
)
def test_templates_read_one_date_on_every_day_and_a_warning_says_so(chat, caplog, call, text):
    template = "{% if strftime_now is defined %}{{ " + call + " }}{% endif %}" + CHATML
    dated = chat(template)
    prompt = dated.encode_prompt([{"role": "user", "content": "When?"}])
    assert dated.tokenizer.decode(prompt).startswith(f"{text}<|im_start|>user")
    Rollout(Brackets(), [Look()]).check(dated)
    assert "calls the clock (strftime_now" in caplog.text
    assert "01 January 2026" in caplog.text
