"""Plugins: the hooks that packages implement, and how installed packages are found.

A plugin is a module with any of the hooks below, named in its distribution's metadata:

    [project.entry-points.turnrl]
    my-tools = "my_tools"

A hook returns classes, whose short names a recipe then knows, or functions.
`TURNRL_LOAD_PLUGINS` restricts which entry points are loaded (comma-separated names; empty for
none), which is also the way round a plugin that is broken. What the core itself brings
(`turnrl.builtins`) is a plugin like any other, and always there.
"""

import functools
import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pluggy

from turnrl.errors import PluginError, did_you_mean, in_short

GROUP = "turnrl"
LOAD_VARIABLE = "TURNRL_LOAD_PLUGINS"
BUILTINS = "turnrl.builtins"

hookimpl = pluggy.HookimplMarker(GROUP)

KINDS: dict[str, type] = {}
"""The hooks that return classes, and the `contract` that these extend."""
HOOKS = ["turnrl_openers", "turnrl_callbacks", "turnrl_commands"]
"""All hooks: functions without parameters that return an iterable.

`turnrl_openers` returns what opens data sets by names that are no class's (`SourceOpener`).
`turnrl_callbacks` returns what makes Lightning's callbacks for every run of `MTGRPO`: classes that
take no argument, or functions of the trainer that return a callback, or None.
`turnrl_commands` returns functions that add a command: each gets argparse's sub-parsers, calls
`add_parser`, and sets `run` (a function of the parsed arguments that returns an exit code) with
`set_defaults`.
"""

_Class = TypeVar("_Class", bound=type)


def contract(hook: str) -> Callable[[_Class], _Class]:
    """Make a class the one that all classes from a hook extend.

    Args:
        hook: Its name, which this makes known.
    """

    def declare(cls: _Class) -> _Class:
        KINDS[hook] = cls
        HOOKS.append(hook)
        return cls

    return declare


@dataclass(frozen=True)
class Plugin:
    """An installed plugin.

    Args:
        name: Entry-point name, which `TURNRL_LOAD_PLUGINS` takes.
        distribution: Distribution that brings it.
        version: The distribution's version.
        manager: pluggy's, in which it is registered by its name.
    """

    name: str
    distribution: str
    version: str
    manager: pluggy.PluginManager = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {self.distribution} {self.version}"

    def fault(self, what: str, cause: Exception | None = None) -> PluginError:
        """Error that says what is wrong with it, and the way round."""
        why = f" ({type(cause).__name__}: {' '.join(str(cause).split())})" if cause else ""
        way = f"set {LOAD_VARIABLE} to the comma-separated plugins to load, without {self.name!r}"
        return PluginError(f"{self} {what}{why}. Fix or uninstall it, or {way}, to skip it.")

    def brings(self, hook: str) -> tuple[Any, ...]:
        """Values that it returns from a hook, checked; nothing if it does not implement it.

        Raises:
            PluginError: If that is not what the hook is for.
        """
        impls = getattr(self.manager.hook, hook).get_hookimpls()
        function = next((i.function for i in impls if i.plugin_name == self.name), tuple)
        try:
            brought = tuple(function())
        except Exception as error:
            raise self.fault(f"does not return a list from {hook}", error) from error
        kind = KINDS.get(hook)
        for cls in brought:
            if kind is not None and not (isinstance(cls, type) and issubclass(cls, kind)):
                what = f"returned {cls!r} from {hook}, which is not a subclass of {kind.__name__}"
                raise self.fault(what)
        return brought


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """Entry points by name. Two distributions may not claim one name for different modules."""
    points: dict[str, importlib.metadata.EntryPoint] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        known = points.setdefault(point.name, point)
        if known.value != point.value:
            both = f"{known.value} and {point.value}. Uninstall one of them."
            raise PluginError(f"two plugins are called {point.name!r}: {both}")
    return points


def _register(plugin: Plugin, module_name: str) -> Plugin:
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise plugin.fault("cannot be imported", error) from error
    # pluggy passes over what is misspelt or unmarked, which would then be silently unused
    named = {n: v for n, v in vars(module).items() if n.startswith("turnrl_") and callable(v)}
    for name, value in named.items():
        if name not in HOOKS:
            hint = f"{did_you_mean(name, HOOKS)} Hooks: {', '.join(sorted(HOOKS))}"
            raise plugin.fault(f"defines {name!r}, which is no hook of turnrl.{hint}")
        if not hasattr(value, f"{GROUP}_impl"):
            raise plugin.fault(f"defines {name!r} without '@turnrl.hookimpl'")
    try:
        plugin.manager.register(module, plugin.name)
        plugin.manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise plugin.fault("does not fit turnrl's hooks", error) from error
    return plugin


@functools.cache
def load_plugins(name: str | None = None) -> list[Plugin]:
    """Import every installed plugin once: the core's own, then the others in order of their names.

    Args:
        name: The name of the one to import alone, which gives none if it is not there.
    Raises:
        PluginError: Naming the distribution, its version, the cause and how to skip it, if a plugin
            cannot be imported or misspells a hook; or naming what `TURNRL_LOAD_PLUGINS` asks for in
            vain.
    """
    importlib.import_module("turnrl.types")  # each contract makes its hook known
    manager = pluggy.PluginManager(GROUP)
    spec = pluggy.HookspecMarker(GROUP)(lambda: ())
    manager.add_hookspecs(type("Hooks", (), dict.fromkeys(HOOKS, staticmethod(spec))))
    points, value = _entry_points(), os.environ.get(LOAD_VARIABLE)
    wanted = set(points) if value is None else {n.strip() for n in value.split(",") if n.strip()}
    if missing := sorted(wanted - set(points)):
        there = ", ".join(sorted(points)) or "none"
        what = f"{LOAD_VARIABLE} asks for {', '.join(missing)}"
        raise PluginError(f"{what}, which no installed distribution provides. Installed: {there}.")
    if name is not None:
        return [_registered(manager, points[name])] if name in wanted else []
    core = Plugin("core", "turnrl", importlib.metadata.version("turnrl"), manager)
    others = (_registered(manager, points[one]) for one in sorted(wanted))
    return [_register(core, BUILTINS), *others]


def _registered(manager: pluggy.PluginManager, point: importlib.metadata.EntryPoint) -> Plugin:
    origin = (point.dist.name, point.dist.version) if point.dist else ("unknown", "unknown")
    return _register(Plugin(point.name, *origin, manager), point.value)


def contributed(hook: str) -> list[Any]:
    """Everything that installed plugins return from a hook, in the plugins' order."""
    return [thing for plugin in load_plugins() for thing in plugin.brings(hook)]


def installed(hook: str) -> dict[str, type]:
    """Classes that installed plugins return from a hook, by short name.

    Raises:
        PluginError: If a plugin returns something else, or two bring different classes of one name.
    """
    classes: dict[str, type] = {}
    for cls in contributed(hook):
        known = classes.setdefault(cls.__name__, cls)
        if known is not cls:
            both = f"two installed classes are called {cls.__name__!r}: {known.__module__} and"
            advice = "Name the one you mean by its full path."
            raise PluginError(f"{both} {cls.__module__}. {advice}")
    return classes


def _other_kind(name: str, kinds: tuple[type, ...]) -> str:
    """`is a tool, and no reward`, if an imported class of this name is of another kind than those
    asked for; else nothing."""
    words = {hook: hook.removeprefix("turnrl_").removesuffix("s") for hook in KINDS}
    words |= {"turnrl_datasets": "data set", "turnrl_answers": "answer rule"}
    wanted = next((words[h] for h, k in KINDS.items() if issubclass(kinds[0], k)), None)
    found = [(words[hook], cls) for hook, kind in KINDS.items() for cls in _extending(kind)]
    others = (word for word, cls in found if cls.__name__ == name and not issubclass(cls, kinds))
    named = next(others, None)
    if named is None:
        return ""
    article = "an" if named[0] in "aeiou" else "a"
    return f"is {article} {named}, and no {wanted or kinds[0].__name__}"


def _extending(kind: type) -> Iterator[type]:
    """The imported classes that extend one, at any depth."""
    below: list[type] = kind.__subclasses__()
    for cls in below:
        yield cls
        yield from _extending(cls)


def find_class(name: str, known: Mapping[str, type], *kinds: type) -> type:
    """The class that a recipe names.

    Args:
        name: A short name, or the full path of any class.
        known: Classes by short name.
        kinds: What it must be a subclass of, one of them, without abstract methods.
    Raises:
        LookupError: If there is none, in words that go on from "KEY names NAME, ".
    """
    module, _, attribute = name.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), attribute) if module else known[name]
        if not (isinstance(cls, type) and issubclass(cls, kinds)):
            bases = [base for kind in kinds for base in (*kind.__subclasses__(), kind)]
            core = (base for base in bases if base.__module__.startswith("turnrl."))
            named = [base.__name__ for base in core if inspect.isabstract(base)]
            raise TypeError(f"it does not extend {' or '.join(named)}")
        if lacks := ", ".join(sorted(getattr(cls, "__abstractmethods__", ()))):
            raise TypeError(
                f"it lacks {lacks}. Define what is missing, or extend a class that does"
            )
    except Exception as error:  # a module may do anything
        ours = isinstance(error, ImportError | AttributeError | KeyError | TypeError)
        cause = (str(error) if ours else in_short(error)) or type(error).__name__
        why = f"cannot be taken: {cause}" if module else "is not installed"
        some = f" Installed: {', '.join(known) or 'none'}. Or give a path, such as package.MyClass."
        if not module and (chosen := os.environ.get(LOAD_VARIABLE)) is not None:
            some = f" {LOAD_VARIABLE} is {chosen!r}: add the plugin that brings it."
        near = did_you_mean(attribute, known)
        if not module and (kind := _other_kind(name, kinds)):
            why, near = kind, ""
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            near = did_you_mean(module, [path.stem for path in Path().glob("*.py")])
        fix = "" if ours else f" Fix the module {module}."
        raise LookupError(f"which {why}.{fix or near or some}") from error
    return cls
