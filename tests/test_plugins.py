"""Plugins: how they are loaded, what is wrong with a broken one, and those of the docs."""

import argparse
import asyncio
import importlib
import json
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import turnrl
from commands import forget
from rollouts import Brackets, collect
from runs import column, data, make_module, trainer
from trajectories import sampled_turn, trajectory
from turnrl import assign_credit
from turnrl.cli import main
from turnrl.plugin.errors import PluginError
from turnrl.plugin.hooks import HOOKS, import_classes, load_classes, load_plugins
from turnrl.rewards.answers import is_empty_answer
from turnrl.types import Start
from turnrl_doctor.checks import Rehearsal

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "turnrl/commands/scaffold/templates/turnrl-example"


def loaded():
    """What is installed, by name."""
    return {plugin.name: plugin for plugin in load_plugins()}


TOOL = """
import turnrl

class Nothing(turnrl.Tool):
    def run(self, calls):
        return []
"""
GOOD = TOOL + "@turnrl.hookimpl\ndef turnrl_tools():\n    return [Nothing]\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts distributions of one module beside the installed ones, until the test is over."""
    monkeypatch.syspath_prepend(str(tmp_path))
    load_plugins.cache_clear()
    modules = []

    def put(name, source, module=None):
        module = module or f"plugin_of_{name.replace('-', '_')}"
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{name.replace('-', '_')}-4.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 4.2\n")
        entry = name.removesuffix("-again")
        (info / "entry_points.txt").write_text(f"[turnrl]\n{entry} = {module}\n")
        importlib.invalidate_caches()

    yield put
    load_plugins.cache_clear()
    for name in modules:
        sys.modules.pop(name, None)


# ------------------------------------------------------------------- installed


def test_the_wheel_and_its_entry_points_have_every_folder():
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    modules = (path for path in ROOT.glob("plugins/turnrl-*/turnrl_*") if path.is_dir())
    names = {path.parent.name: path.name for path in modules}
    points = {name.removeprefix("turnrl-"): module for name, module in names.items()}
    assert root["project"]["entry-points"]["turnrl"] == points
    wheel = root["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = {f"plugins/{name}/{module}" for name, module in names.items()}
    assert set(wheel["packages"]) == packages | {"turnrl", "recipes"}
    assert set(wheel["dev-mode-dirs"]) == {f"plugins/{name}" for name in names} | {"."}


def test_a_plugin_is_loaded_with_its_distribution_and_version(install):
    install("nothing", GOOD)
    plugin = loaded()["nothing"]
    assert (plugin.distribution, plugin.version) == ("nothing", "4.2")
    (tool,) = plugin.load_components("turnrl_tools")
    assert load_classes("turnrl_tools")["Nothing"] is tool
    assert {
        hook: plugin.load_components(hook) for hook in HOOKS if hook != "turnrl_tools"
    } == dict.fromkeys((hook for hook in HOOKS if hook != "turnrl_tools"), ())


LAZY = GOOD.replace("[Nothing]", "['heavy:Nothing', 'broken_one:Lost']").replace(
    TOOL, "import turnrl\n"
)


def test_a_class_behind_a_reference_is_imported_when_it_is_named(install, tmp_path):
    install("lazy", LAZY)
    (tmp_path / "heavy.py").write_text(TOOL)
    import_classes({"WikiSearch", "a text"})
    assert "heavy" not in sys.modules
    import_classes({"Nothing"})
    assert sys.modules.pop("heavy").Nothing
    with pytest.raises(PluginError, match=r"'lazy' of lazy 4.2.*broken_one:Lost.*No module"):
        import_classes({"Lost"})


# -------------------------------------------------------------- broken plugins


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module", r"cannot be imported \(ModuleNotFoundError: .*no_such_module"),
        (
            GOOD.replace("turnrl_tools", "turnrl_tool"),
            r"defines 'turnrl_tool', which is not a hook of turnrl\. Did you mean turnrl_tools",
        ),
        (GOOD.replace("turnrl_tools", "tools"), r"does not fit turnrl's hooks \(.*'tools'"),
        (GOOD.replace("tools()", "tools(first)"), r"does not fit turnrl's hooks \(.*first"),
        (
            GOOD.replace("@turnrl.hookimpl", ""),
            r"defines 'turnrl_tools' without '@turnrl.hookimpl'",
        ),
        (
            GOOD.replace("[Nothing]", "[7]"),
            r"returned 7 from turnrl_tools, which is not a subclass of Tool",
        ),
        (
            GOOD.replace("[Nothing]", "[look]") + "def look(x: str) -> str:\n    'Look.'\n",
            r"returned <function look.* from .* names it by its path, plugin_of",
        ),
        ("raise SystemExit(3)", r"cannot be imported \(SystemExit: 3"),
        (
            GOOD.replace("[Nothing]", "1 / 0"),
            r"does not return a list from turnrl_tools \(ZeroDivision",
        ),
    ],
)
def test_a_broken_plugin_is_named_with_the_cause_and_a_workaround(install, source, message):
    install("broken", source)
    with pytest.raises(PluginError, match=message) as caught:
        load_classes("turnrl_tools")
    assert str(caught.value).startswith("plugin 'broken' of broken 4.2")
    assert "set TURNRL_LOAD_PLUGINS to the comma-separated plugins to load" in str(caught.value)


COMMAND = "import turnrl\n@turnrl.hookimpl\ndef turnrl_commands():\n    return [add]\n"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("1 / 0", "cannot be imported (ZeroDivisionError"),
        (COMMAND.replace("[add]", "1 / 0"), "does not return a list from turnrl_commands"),
        (COMMAND + "def add(commands): commands.add_parser('fit')", "conflicting subparser: fit"),
    ],
)
def test_plugins_and_commands_are_listed_beside_a_broken_plugin(install, capsys, source, says):
    install("broken", source)
    install("works", GOOD)
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    output = capsys.readouterr()
    assert ended.value.code == 0
    assert "doctor" in output.out  # the command of another plugin
    for said in (says, "plugin 'broken' of broken 4.2"):
        assert said in " ".join(output.err.split())
    assert main(["fitt"]) == 2
    assert "Did you mean fit" in capsys.readouterr().err
    code = main(["plugins"])
    listed = " ".join(capsys.readouterr().out.split())
    assert "works (works 4.2) turnrl_tools Nothing" in listed
    assert says in listed
    assert code == 1


def test_two_plugins_of_one_name_do_not_hide_the_others(install, capsys):
    install("same", GOOD)
    install("same-again", GOOD)
    assert main(["plugins"]) == 1
    assert "two plugins are called 'same'" in capsys.readouterr().out


def test_the_variable_loads_only_the_plugins_it_names(install, monkeypatch):
    install("broken", "1 / 0")
    monkeypatch.setenv("TURNRL_LOAD_PLUGINS", "segmenters, rewards")
    assert list(loaded()) == ["core", "rewards", "segmenters"]
    assert set(load_classes("turnrl_tools")) == {"FunctionTool"}  # the core's own


def test_the_variable_cannot_request_a_plugin_that_is_not_installed(install, monkeypatch):
    monkeypatch.setenv("TURNRL_LOAD_PLUGINS", "segmenters,reflect")
    with pytest.raises(PluginError, match=r"asks for reflect, .*Installed: .*segmenters"):
        load_plugins()


def test_two_installed_classes_cannot_share_a_name(install):
    install("one", GOOD)
    install("two", GOOD)
    with pytest.raises(PluginError, match="two installed classes are called 'Nothing'"):
        load_classes("turnrl_tools")


def test_a_plugins_callback_joins_every_run_and_none_is_duplicated(
    install, tiny_model, tmp_path, capsys
):
    (example,) = [block for block in documented("python") if "def turnrl_callbacks" in block]
    install("rewarded", example)
    assert main(["plugins"]) == 0
    listing = capsys.readouterr().out
    block = listing[listing.index("rewarded  (rewarded 4.2)") :].split("\n")
    assert block[1].split() == ["turnrl_callbacks", "Rewards"]
    run = trainer(tmp_path, 2)
    module = make_module(tiny_model)
    run.fit(module, data())
    run.validate(module, data(), verbose=False)
    written = (tmp_path / "version_0" / "rewards.txt").read_text().split()
    totals = column(tmp_path, "reward/total")
    assert [float(total) for total in written] == pytest.approx(totals, abs=6e-4)
    assert [type(callback).__name__ for callback in run.callbacks].count("Rewards") == 1


CALLBACKS = """
import turnrl

@turnrl.hookimpl
def turnrl_callbacks():
    return [lambda trainer: MADE]
"""


def test_a_plugins_callback_hook_may_return_no_callback(install, tiny_model, tmp_path):
    install("choosy", CALLBACKS.replace("MADE", "None if trainer.max_epochs == 1 else 1 / 0"))
    run = trainer(tmp_path, 1, limit_val_batches=0)
    run.fit(make_module(tiny_model), data())
    assert run.global_step == 2


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("1 / 0", r"cannot make a callback by .*lambda.* \(ZeroDivisionError"),
        ("7", r"made 7, which is not a Lightning callback\. Fix or uninstall it"),
    ],
)
def test_a_plugin_that_makes_no_callback_is_named(install, tiny_model, tmp_path, made, message):
    install("broken", CALLBACKS.replace("MADE", made))
    with pytest.raises(PluginError, match=message) as caught:
        trainer(tmp_path, 1).fit(make_module(tiny_model), data())
    assert str(caught.value).startswith("plugin 'broken' of broken 4.2")


# ------------------------------------------------------------------------ docs


def documented(language):
    text = (ROOT / "docs/howto/plugins.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_every_hook_is_documented():
    text = (ROOT / "docs/reference/hooks.md").read_text()
    assert [hook for hook in HOOKS if f"| `{hook}` |" not in text] == []


def test_the_code_on_the_plugins_page_matches_its_files():
    text = (ROOT / "docs/howto/plugins.md").read_text()
    block = r"\]\((\S+\.py)\):\n\n(?:<!--[^\n]*-->\n)*```python\n(.*?)^```"
    shown = re.findall(block, text, re.MULTILINE | re.DOTALL)
    assert [Path(link).stem for link, _ in shown] == [
        "tool",
        "segmenter",
        "player",
        "turn_reward",
        "source",
        "estimator",
        "engine",
    ]
    for link, block in shown:
        assert block == (ROOT / "docs" / "howto" / link).read_text(), link
    entry = tomllib.loads(documented("toml")[0])["project"]
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    assert entry["entry-points"] == project["entry-points"]


@pytest.fixture
def examples(monkeypatch):
    """The names that the examples define, run one after the other."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    space = {"__name__": "docs"}
    for example in documented("python"):
        exec(compile(example, "docs/howto/plugins.md", "exec"), space)
    yield space
    space.clear()
    forget("turnrl_example")


def test_the_examples_in_the_docs_run(examples):
    examples["test_the_notes_keep_to_their_contract"]()
    examples["test_the_corridor_keeps_to_its_contract"]()
    examples["test_the_engine_keeps_to_its_contract"]()


def test_the_rehearsal_in_the_docs_replaces_the_tool(examples, tiny_model):
    module = make_module(tiny_model)
    module.rollout = replace(module.rollout, tools=[examples["Mail"]()])
    start = Start(torch.device("cpu"), module, data())
    findings = {finding.name: finding.text for finding in Rehearsal().run(start)}
    assert findings["tool mail"].endswith(": not sent: a rehearsal")
    assert "learning" in findings


def test_the_command_in_the_docs_takes_a_recipe_and_its_own_options(examples, recipe, capsys):
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for add in examples["turnrl_commands"]():
        add(commands)
    parsed = parser.parse_args(["show", "recipe.yaml", "--model.group_size", "6", "--times=3"])
    assert parsed.run(parsed) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == [
        "turnrl show: recipe.yaml",
        "writing to runs/recipe-show/version_0",
    ]
    assert printed[-1] == "6 3"
    assert not Path("runs").exists()  # nothing was written


@pytest.mark.slow
def test_a_command_can_take_a_run_as_its_recipe_and_change_settings(trained, capsys):
    def prepare(inputs):
        if inputs.agent is None:
            return inputs
        assert inputs.agent.run == Path("runs/recipe/version_0")
        model = inputs.contents["model"]
        model = {**model, "group_size": 2 * int(model["group_size"])}
        return replace(inputs, contents={**inputs.contents, "model": model})

    def show(built):
        print(built.module.group_size, built.checkpoint, built.settings["loud"])

    parser = argparse.ArgumentParser()
    more = {"settings": {"loud": (bool, False, "Say more")}, "takes_run": True}
    commands = parser.add_subparsers()
    turnrl.add_recipe_command(commands, "show", "show it", show, prepare=prepare, **more)

    def printed(arguments):
        parsed = parser.parse_args(["show", *arguments])
        assert parsed.run(parsed) == 0
        return capsys.readouterr().out.splitlines()[-1]

    for arguments, line in (
        (["recipe", "--model.group_size", "6"], "12 None False"),
        (["recipe.yaml", "--loud", "--model.group_size", "6"], "6 None True"),
    ):
        assert printed(arguments) == line


def test_the_stateful_tool_in_the_docs_keeps_a_session_per_trajectory(examples, chat):
    tool = examples["Notes"]()

    def says(number, turn):
        first, second = (
            json.dumps({"text": text}) for text in (f"I am {number}.", "I have been here.")
        )
        return (f"[note {first}]", f"[note {second}]", "=done")[turn]

    questions = [turnrl.Question(q, "What?", ("x",)) for q in "ab"]
    groups = collect(turnrl.Rollout(Brackets(), [tool]), chat, says, questions, 2)
    shown = [[r.content for r in t.results] for group in groups for t in group]
    assert shown == [[f"1. I am {n}.", f"1. I am {n}.\n2. I have been here."] for n in range(4)]


def test_the_toolset_in_the_docs_shares_a_session_and_hands_figures_to_a_reward(examples, chat):
    walks = [  # two steps and one more; there and back; nowhere
        ('[go {"rooms": 2}];[look {}]', '[go {"rooms": 1}]', "=done"),
        ('[go {"rooms": 3}];[go {"rooms": -3}]', '[go {"rooms": 3}]', "=done"),
        ("=done",),
    ]
    rollout = turnrl.Rollout(Brackets(), [examples["Corridor"]()])
    question = turnrl.Question("q", "Walk.", ("x",), {"goal": 3})
    says = lambda number, turn: walks[number][turn]  # noqa: E731
    (group,) = collect(rollout, chat, says, [question], 3)
    assert [r.content for r in group[0].results] == [
        f"You stand in room {room}." for room in (2, 2, 3)
    ]
    assert [t.figures for t in group] == [
        {"arrived": 1.0, "steps": (2.0, 1.0)},
        {"arrived": 1.0, "steps": (6.0, 3.0)},
        {"arrived": 0.0, "steps": ()},
    ]
    read = chat.tokenizer.decode(group[0].sample.prompt_ids)
    assert "Walk.\n\nYou stand in room 0 of a corridor. Walk to room 3.<|im_end|>" in read
    # 1 - 0.01 x 3; 1 - 0.01 x 9; 0
    scored = turnrl.score_group(group, [examples["Arrived"]()])
    assert torch.allclose(scored.outcome, torch.tensor([0.97, 0.91, 0.0]))


def test_the_estimator_in_the_docs_assigns_credit_as_described(examples):
    question = turnrl.Question("q", "What?", ("x",))
    turn = sampled_turn("", (5,), (-1.0,))
    group = turnrl.Group(
        question,
        tuple(trajectory(question, (1,), (turn,) * n, "turns") for n in (2, 1)),
        turn_rewards=torch.tensor([[0.2, 0.5], [0.0, 0.0]]),
        outcome=torch.tensor([1.0, 0.0]),
        reached=torch.tensor([[True, True], [True, False]]),
    )
    # to go: 1.7 and 1.5 of the first, 0 of the second; the means of those that took the turn are
    # 0.85 and 1.5
    credit = assign_credit(group, examples["ExampleToGo"]())
    assert torch.allclose(credit.turns, torch.tensor([[0.85, 0.0], [-0.85, 0.0]]))


def test_the_answer_rule_in_the_docs_compares_years(examples):
    question = turnrl.Question("q", "When?", "4 May 1999", rule=examples["Year"]())
    answers = ("1999-05-04", "in 1999", "in 1998", "then")
    assert [turnrl.exact_match(a, question) for a in answers] == [True, True, False, False]
    assert is_empty_answer("", question)


def test_the_engine_in_the_docs_samples_concurrent_turns_as_it_samples_each_alone(
    examples, tiny_policy
):
    engine, samplings = (
        examples["ExampleEngine"]().build(),
        [turnrl.Sampling(n, seed=n) for n in (3, 9, 5)],
    )
    tiny_policy.network.train()  # whatever mode the tests before have left it in
    engine.start(tiny_policy, 64)

    async def work():
        alone = [await engine.open([5, 9]).generate([7], sampling) for sampling in samplings]
        sessions = [engine.open([5, 9]) for _ in samplings]
        turns = [
            asyncio.ensure_future(session.generate([7], sampling))
            for session, sampling in zip(sessions, samplings, strict=True)
        ]
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="its turn was cancelled or is not done"):
            sessions[0].fork()
        await engine.drain()
        assert [turn.result() for turn in turns] == alone
        # the first to end did not switch the network's mode under the others
        assert tiny_policy.network.training
        return sessions[0]

    session = asyncio.run(work())
    engine.close()
    engine.start(tiny_policy, 64)
    with pytest.raises(RuntimeError, match="the weights have changed since"):
        asyncio.run(session.generate([], samplings[0]))
