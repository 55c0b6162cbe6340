"""Recipes and options that a user gave to a command, put together.

It is read before anything heavy is imported, so that a missing file or a broken line is told at
once. It is put together here alone: what is explained, chosen and built is one and the same.
"""

import io
import json
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import yaml

from turnrl.errors import RecipeError, did_you_mean
from turnrl.recipe.agents import Agent, find_agent
from turnrl.recipe.bundled import find_recipe, recipe_like
from turnrl.recipe.folders import LATEST, RUNS, checkpoint_to_resume, held, newest, next_version
from turnrl.recipe.keys import named_elsewhere, refuse_unknown_below
from turnrl.recipe.moved import renamed

SECTIONS = ("seed_everything", "model", "data", "trainer", "ckpt_path")
"""The top of a recipe."""
Settings = Mapping[str, tuple[Any, ...]]
"""Type and default of each further key, and perhaps its line of help."""
Flags = Mapping[str, str]
"""Lines of help of options without a value, which are no settings of a recipe."""
COMMAND = "command"
"""Key of a run's `config.yaml` that names its command."""
_MAPPINGS = ("model", "data", "trainer")
_PARTS = {"class_path", "init_args", "dict_kwargs"}
SETTLED = "--settled"
"""Option with which the first process of a run tells the others, as JSON, what it has settled of
what was given."""
_ASKS = ("--help", "--print_config")
_NO_PATHS = ("answer_pattern", "instructions")
"""Settings in which a $ is a $."""
_VARIABLE = r"(?<!\\)\$(?:[A-Za-z_]\w*|\{\w+\})"
_DASHES = ("-", "\N{EN DASH}", "\N{EM DASH}")  # word processors join two hyphens


@dataclass(frozen=True)
class Given:
    """Recipes and options as they were given.

    Args:
        command: `fit`, say.
        settings: Further keys at the top that the command knows.
        contents: What they say together, the later over the earlier.
        arguments: What was given, for the other processes of a run.
        files: The recipes.
        asks_for_help: What asks for help, or for a recipe to be printed, and for no run.
        own: Settings of the CSVLogger that keeps a folder for the run; empty if nothing logs it.
        flags: Options of the command without a value.
        raised: Those flags that were given.
        agent: The run that the first word names, whose recipe is the first then; None if it names
            none.
        number: The number that the run has claimed, None before it has.
    """

    command: str
    settings: Settings
    contents: Mapping[str, Any]
    arguments: Sequence[str]
    files: Sequence[str]
    asks_for_help: Sequence[str]
    own: Mapping[str, Any] = field(default_factory=dict)
    flags: Flags = field(default_factory=dict)
    raised: Sequence[str] = ()
    agent: Agent | None = None
    number: int | None = None

    @property
    def name(self) -> str:
        """Name of a run: that of the run that was named, or else the last recipe's without its
        ending."""
        if self.agent is not None and (run := self.agent.run) is not None:
            return (run.parent if run.name.startswith("version_") else run).name
        return Path(self.files[-1]).stem if self.files else ""

    @property
    def suffix(self) -> str:
        """Ending of the name of its runs' folder: commands keep their runs apart."""
        return "" if self.command == "fit" else f"-{self.command}"

    @property
    def home(self) -> Path | None:
        """The folder of the runs of this name, whatever logs them; None if nothing does."""
        return Path(self.own["save_dir"], self.own["name"]) if self.own else None

    @property
    def trained(self) -> Path:
        """The folder of the runs of `fit`, in which `last` and `best` are looked for."""
        home = self.home or RUNS / self.name
        return Path(str(home).removesuffix(self.suffix))

    def checkpoint(self) -> str | None:
        """Look up the file of `ckpt_path`, of which `last` and `best` are in the newest run.

        Raises:
            CheckpointError: If no run has it.
        """
        name: str | None = self.contents.get("ckpt_path")
        return str(newest(self.trained, name)) if name in LATEST else name

    def with_checkpoint(self) -> "Given":
        """The same, with the file that `checkpoint` looks up as `ckpt_path`.

        Raises:
            CheckpointError: If no run has it.
        """
        file = self.checkpoint()
        return replace(self, contents={**self.contents, "ckpt_path": file}) if file else self

    @cached_property
    def folder(self) -> Path | None:
        """Where the run will leave its files; None if nowhere. While it has claimed no number,
        another run may take it."""
        if self.home is None or self._is_trial:
            return None
        version = self.number if self.own.get("version") is None else self.own["version"]
        number = str(next_version(self.home) if version is None else version)
        return self.home / (f"version_{number}" if number.isdigit() else number)

    @property
    def counts(self) -> bool:
        """True if its folder gets the next number of those in `home`."""
        local = "://" not in str(self.own.get("save_dir"))
        return self.folder is not None and self.own.get("version") is None and local

    @property
    def place(self) -> str:
        """Phrase about the folder, which follows `writing`."""
        if self._is_trial:
            return "no files: trainer.fast_dev_run is a trial"
        if self.folder is None:
            what = "checkpoints/ alone" if self.command == "fit" else "no files"
            return f"{what}: trainer.logger is false"
        return f"to {self.folder}"

    @property
    def _is_trial(self) -> bool:
        return self.contents["trainer"].get("fast_dev_run") not in (None, False, 0, "0")

    @property
    def device(self) -> str:
        """Where it will compute, as far as the machine tells without torch."""
        asked = str(self.contents["trainer"].get("accelerator") or "auto")
        cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if asked in ("auto", "gpu", "cuda") and cards and not hidden:
            model = re.search(r"^Model:\s*(.+)$", cards[0].read_text("utf-8"), re.MULTILINE)
            return model[1] if model else "a GPU"
        on_mac = sys.platform == "darwin" and platform.machine() == "arm64"
        if asked in ("cpu", "auto"):
            return "mps" if on_mac and asked == "auto" else "the CPU"
        return asked


def read_given(
    command: str,
    arguments: Sequence[str],
    settings: Settings | None = None,
    *,
    takes_run: bool = False,
    prepare: Callable[[Given], Given] | None = None,
    flags: Flags | None = None,
    raised: Sequence[str] = (),
) -> Given:
    """Read what follows a command: recipes, then options.

    Args:
        command: `fit`, say.
        arguments: What follows it; `-` is a recipe on standard input.
        settings: Further keys at the top that the command knows.
        takes_run: A run may stand in the place of the first recipe; see `find_agent`.
        prepare: What the command says over what was given, once that is put together.
        flags: Options of the command without a value. The `config.yaml` of a run of before may
            hold them as keys, which are passed over. Other recipes may not.
        raised: The flags that were given.
    Raises:
        RecipeError: If there is no recipe, one cannot be read, or an option is not one.
        CheckpointError: If the file of `ckpt_path` is not there, or is no checkpoint; or if the
            first word is no run, no checkpoint and no recipe.
    """
    words, agent = [*arguments], None
    if takes_run and words and not words[0].startswith(_DASHES):
        named = find_agent(words[0])
        if named.run is not None or named.checkpoint is not None:
            agent, words[0] = named, _recipe_of(named, command)
    contents: dict[str, Any] = {key: {} for key in _MAPPINGS}
    kept: list[str] = []
    files: list[str] = []
    asks_for_help: list[str] = []
    settled: dict[str, Any] = {}
    for option, value in _options(words, settings or {}):
        if option in _ASKS or option.endswith(".help"):
            asks_for_help.append(f"{option}={value}" if value else option)
            continue
        if value is None:
            see = f"'turnrl {command} --help' lists what there is."
            raise RecipeError(f"{option} has no value. Give it as {option} VALUE; {see}")
        if option == SETTLED:
            settled = json.loads(value)
            continue
        if option == "--config":
            value = find_recipe(value)
            new = _recipe(value, command, flags or {})
            new = _without_place(new) if agent is not None and not files else new
            files.append("stdin" if "\n" in value else value)
        else:
            new = renamed(_value(value))
            for name in reversed(option.removeprefix("--").split(".")):
                new = {name: new}
        kept.append(f"{option}={value}")
        contents.update(_over(contents, new))
    if not files and not asks_for_help:
        usage = f"turnrl {command} RECIPE.yaml [--key value ...]"
        raise RecipeError(f"'turnrl {command}' needs a recipe: {usage}")
    given = Given(
        command,
        settings or {},
        contents if settled else _with_paths(contents),
        kept,
        files,
        asks_for_help,
        flags=flags or {},
        raised=raised,
        agent=agent,
    )
    _refuse_endless(given.contents)
    if settled:
        return _settled(replace(given, **settled))
    return _settled(prepare(given) if prepare else given)


def _refuse_endless(value: Any, key: str = "") -> None:
    """Refuse a number that is not finite, such as `.inf` in YAML.

    Raises:
        RecipeError: Naming its key.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_endless(item, f"{key}.{name}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _refuse_endless(item, f"{key}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise RecipeError(f"{key.lstrip('.')} is {value}; it must be finite. Give another number.")


def _with_paths(contents: Mapping[str, Any]) -> dict[str, Any]:
    """The contents with their paths filled in, and each part of the recipe as a mapping."""
    filled = {key: each_text(value, _filled_in, key) for key, value in contents.items()}
    for key in _MAPPINGS:
        section = filled[key] or {}
        filled[key] = section if isinstance(section, dict) else {"class_path": section}
    return filled


def _recipe_of(agent: Agent, command: str) -> str:
    """The recipe of a run that stands in a recipe's place.

    Raises:
        RecipeError: If it is a checkpoint outside of any run, or the run has no recipe.
    """
    if agent.run is None:
        step = f"Give a recipe for it: 'turnrl {command} RECIPE --ckpt_path {agent.checkpoint}'."
        raise RecipeError(f"the checkpoint {str(agent.checkpoint)!r} is in no run. {step}")
    return str(held(agent.run, "recipe") / agent.recipe.name)


def refuse_unknown(given: Given, homes: Callable[[str], Sequence[str]] | None = None) -> None:
    """Refuse a key that the command does not know.

    Args:
        given: Recipes and options, put together.
        homes: Settings further down that a key at the top may mean. Without it, as before torch is
            imported, a key at the top is refused only if something known is near; and one below
            the top if source code tells that its class does not have it.
    Raises:
        RecipeError: If there is one.
    """
    known = [*SECTIONS, *given.settings]
    for key, value in ((str(key), value) for key, value in given.contents.items()):
        near = did_you_mean(key, known) or named_elsewhere(key, value)
        near = near or did_you_mean(key, homes(key) if homes else ())
        if key not in known and (near or homes):
            raise RecipeError(f"unknown key {key!r}.{near} There are {', '.join(known)}.")
    if homes is None:
        refuse_unknown_below(given.contents, given.files)


def _recipe(path: str, command: str, flags: Flags) -> dict[str, Any]:
    """The settings of a recipe, without the command that a run notes beside them.

    Raises:
        RecipeError: If it has an option without a value as a key. The `config.yaml` of runs of
            before may have one: every key at the top stands there.
    """
    contents = read_recipe(path)
    noted = {*SECTIONS} <= {*contents}
    for flag in () if noted else flags:
        if flag in contents:
            what = f"{flag} is an option of 'turnrl {command}', and no key of a recipe"
            name = "-" if "\n" in path else path
            raise RecipeError(f"{what}. Leave it out of {name!r}, and give --{flag}.")
    new = {key: value for key, value in contents.items() if key not in (COMMAND, *flags)}
    if "\n" not in path and (file := Path(path)).with_name("checkpoints").is_dir():
        ours = {key: new[key] for key in ("model", "data") if key in new}
        new |= each_text(ours, partial(relocated, file))
    return new


def _without_place(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe of a run, without where that run began and where it wrote."""
    new = {key: value for key, value in recipe.items() if key != "ckpt_path"}
    if isinstance(trainer := new.get("trainer"), dict):
        new["trainer"] = {key: value for key, value in trainer.items() if key != "logger"}
    return new


def _settled(given: Given) -> Given:
    """The given recipe with the logger that keeps its folder, and with the file of its checkpoint
    unless that is looked up among its runs."""
    trainer = given.contents["trainer"]
    logger, own = _with_own(trainer.get("logger", True), f"{given.name}{given.suffix}")
    contents = {**given.contents, "trainer": {**trainer, "logger": logger}}
    checkpoint = contents.get("ckpt_path")
    if isinstance(checkpoint, str) and checkpoint not in LATEST and not given.asks_for_help:
        contents["ckpt_path"] = checkpoint_to_resume(checkpoint)
    return replace(given, contents=contents, own=own)


def _with_own(value: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """The loggers of a recipe, after one that keeps a folder for the run. Its files lie where the
    command says, whatever else logs it, and `last` and `best` find them.

    That one is the recipe's first CSVLogger, or is made beside its loggers. `save_dir` and `name`
    are those of the recipe's first logger, or else `runs` and the name of the recipe.

    Returns:
        The recipe's loggers, that one first if they have it; and its settings.
    """
    loggers = [{"class_path": one} if isinstance(one, str) else one for one in listed(value)]
    named: list[dict[str, Any]] = [one for one in loggers if isinstance(one, dict)]
    own = next(filter(_is_csv, named), {})
    first = own or next(iter(named), {})
    settings = {key: item for key, item in first.items() if key not in _PARTS}
    settings |= first.get("init_args") or {}
    kept = settings if own else {}
    bare = kept.get("name") == ""  # runs then lie in `save_dir` itself
    kept |= {"save_dir": settings.get("save_dir") or str(RUNS)}
    kept |= {"name": "" if bare else settings.get("name") or name}
    others = [one for one in loggers if one is not own and one is not True]
    if own or not others:
        others.insert(0, {"class_path": own.get("class_path", "CSVLogger"), "init_args": kept})
    return (others if len(others) > 1 else others[0], kept) if loggers else ([], {})


def _is_csv(logger: dict[str, Any]) -> bool:
    return str(logger.get("class_path", "CSVLogger")).endswith("CSVLogger")


def each_text(value: Any, change: Callable[[str, str], Any], key: str = "") -> Any:
    """A recipe's value with every text in it changed.

    Args:
        value: The value, as YAML gives it.
        change: From a text and its key to what takes its place.
        key: Where the value stands.
    """
    if isinstance(value, dict):
        return {name: each_text(item, change, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [each_text(item, change, f"{key}[{i}]") for i, item in enumerate(value)]
    return change(value, key) if isinstance(value, str) else value


def relocated(file: Path, text: str, key: str) -> str:
    """A text of the recipe that a run keeps, whose paths started from the folder that the run was
    begun in. Those that lead nowhere from here are tried from the folders above the run's file. A
    model, which a checkpoint knows again, is also found by the end of its path, after a move."""
    exists = os.path.exists  # unlike Path's, at home with texts of any length
    model = key.endswith(".model") and "://" not in text
    if not (model or "/" in text) or exists(text):
        return text
    # the run's own folder has the model that it trained, and nothing that it began with
    above = [folder for folder in file.resolve().parents if not (folder / "checkpoints").is_dir()]
    there = [folder / text for folder in above]
    if model:  # the hub's names end as folders may: one with a model in it is meant
        parts = Path(text).parts
        ends = [Path(*parts[n:]) for n in range(1, len(parts))]
        moved = (folder / end for end in ends for folder in above)
        there += [path for path in moved if exists(path / "config.json")]
    return next((str(path) for path in there if exists(path)), text)


def _filled_in(text: str, key: str) -> str:
    """A text with `~`, `$NAME` and `${NAME}` filled in, as a shell would, if it may be a path: one
    without spaces, in which a $ is nothing but the beginning of a name.

    Raises:
        RecipeError: If the path, or a folder in it, is a variable that is not set.
    """
    bare = key.rpartition(".")[2]
    if bare in _NO_PATHS or not re.fullmatch(rf"(?:[^\s$]|{_VARIABLE})+", text):
        return text
    filled = os.path.expandvars(Path(text).expanduser() if text.startswith("~/") else text)
    if missing := re.search(rf"(?:^|/){_VARIABLE}", filled):
        name = missing[0].strip("/${}")
        step = f"Run 'export {name}=...' first, or write the path out."
        raise RecipeError(f"{key} is {text!r}, and no variable {name} is set. {step}")
    return filled


def _options(arguments: Sequence[str], settings: Settings) -> Iterator[tuple[str, str | None]]:
    """Options with their values, None if they have none; recipes as values of `--config`. Settings
    that may be lists take several words."""
    rest, begun = list(arguments), False
    lists = {f"--{key}" for key, (kind, *_) in settings.items() if _takes_list(kind)}
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        begun = begun or (word.startswith(_DASHES) and word != "-")
        if not begun and (not equals or Path(word).exists()):
            # what is piped in is read once, here, and other processes of a run have it from us
            yield "--config", sys.stdin.read() + "\n" if word == "-" else word
            continue
        option = {"-c": "--config", "-h": "--help"}.get(option, option)
        if not re.fullmatch(r"--\w[\w.-]*\+?", option):
            meant = "--" + re.sub(r"\W+", ".", option.partition(" ")[0]).strip(".") + equals + value
            dashed = word.startswith(_DASHES) and meant != word
            hint = f"Did you mean {meant}? " if dashed or equals else ""
            order = "Recipes come first, then options as --key value."
            raise RecipeError(f"unknown argument {word!r}. {hint}{order}")
        takes = rest and option not in _ASKS and not rest[0].startswith("--")
        given = value if equals else rest.pop(0) if takes else None
        if given is not None and option in lists:
            several = [given]
            while rest and not equals and not rest[0].startswith("--"):
                several.append(rest.pop(0))
            # a list or a mapping in YAML stays as it is
            whole = len(several) == 1 and given.startswith(("[", "{"))
            given = given if whole else json.dumps(several)
        yield option, given


def _takes_list(kind: Any) -> bool:
    return any(get_origin(member) is list for member in get_args(kind))


class _Loader(yaml.SafeLoader):
    """YAML as it is meant: a key that stands twice is a mistake."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in names[:number]:
                problem = f"the key {key.value!r} stands there twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return node


def _value(text: str) -> Any:
    """An option's value: lists, mappings, true, false and null are YAML, all else is text."""
    try:
        return yaml.load(text, _Loader) if re.match(r"[\[{]|(?i:null|true|false)$", text) else text
    except yaml.YAMLError:
        return text


def read_recipe(path: str) -> dict[str, Any]:
    """A recipe's contents.

    Args:
        path: Its file, or what it says, if that has a line's end.
    Raises:
        RecipeError: If there is no such file, or it is not a YAML mapping.
    """
    name = "-" if "\n" in path else path
    try:
        with io.StringIO(path) if name == "-" else Path(path).open(encoding="utf-8") as file:
            if not isinstance(contents := yaml.load(file, _Loader), dict):
                raise yaml.YAMLError(f"it holds {contents!r:.40}")
    except OSError as error:
        folder = Path(path) if isinstance(error, IsADirectoryError) else Path(path).parent
        here = sorted(map(str, folder.glob("*.y*ml")))
        near = ""
        if isinstance(error, FileNotFoundError):
            near = did_you_mean(path, here) or recipe_like(path)
        there = near or f" Recipes there: {', '.join(here) or 'none'}."
        give = "Give the path of a YAML file, or a name that 'turnrl recipes' lists."
        what = f"no recipe at {path!r}: {error.strerror}.{there} {give}"
        raise RecipeError(what) from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe {name!r} is not UTF-8: {error}. Save it as UTF-8.") from error
    except yaml.YAMLError as error:
        what = f"recipe {name!r} is no YAML mapping: {' '.join(str(error).split())}."
        raise RecipeError(f"{what} Fix it; its keys are {', '.join(SECTIONS)}.") from error
    return cast(dict[str, Any], renamed(contents))


class _Added(list[Any]):
    """A list that ends with what an option added, which options after it are about."""


def _over(old: Any, new: Any, key: str = "") -> Any:
    """One value over another; mappings are put together.

    A class may be given by its name alone, its settings without `init_args`, and one before the
    other. Settings do not pass from one class to another.

    Raises:
        RecipeError: If the new one is about an item of a list, and does not say which.
    """
    if isinstance(old, list) and isinstance(new, dict):
        if isinstance(old, _Added):
            return _Added([*old[:-1], _over(old[-1], new, key)])
        what = f"{key} is a list of {len(old)}, and {new} does not say which of them it is for"
        raise RecipeError(f"{what}. Give the whole list, as --{key} '[...]', or change the recipe.")
    if not isinstance(new, dict) and not (isinstance(new, str) and isinstance(old, dict) and old):
        return new
    under, over = ({"class_path": one} if isinstance(one, str) else one for one in (old, new))
    under = under if isinstance(under, dict) else {}
    if "class_path" in {**under, **over}:
        under, over = (one if _PARTS & {*one} else {"init_args": one} for one in (under, over))
        names = {str(one.get("class_path", "")).rpartition(".")[2] for one in (under, over)}
        if len(names - {""}) > 1:
            return new
    both = dict(under)
    for name, value in over.items():
        place = str(name).removesuffix("+")
        there = both.get(place)
        if str(name).endswith("+"):
            there, value = None, _Added(listed(there) + listed(value))
        both[place] = _over(there, value, f"{key}.{place}".lstrip("."))
    return both


def listed(value: Any) -> list[Any]:
    """A value that may stand for a list of itself, as a list; null and false are none."""
    some = value if isinstance(value, list) else [value]
    return [one for one in some if one is not None and one is not False]
