"""Plugins: the hooks that packages implement, and how installed packages are found.

A plugin is a module with any of the hooks below, named in its distribution's metadata:

    [project.entry-points.turnrl]
    my-tools = "my_tools"

A hook returns functions, or classes that a recipe may then name without their module. It may
return a reference in the place of each, such as "my_tools.search:Search": then only those that a
command or a recipe needs are imported.
`TURNRL_LOAD_PLUGINS` lists the entry points to load (comma-separated names; empty for none), for
example all but a broken plugin. turnrl's own components (`turnrl.commands.builtins`) are a plugin
like any other, except that it is always loaded.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import pluggy

from turnrl.plugin.errors import PluginError, RecipeError, suggest_name, summarize_error

GROUP = "turnrl"
LOAD_VARIABLE = "TURNRL_LOAD_PLUGINS"
BUILTINS = "turnrl.commands.builtins"

hookimpl = pluggy.HookimplMarker(GROUP)

KINDS: dict[str, type] = {}
"""The hooks that return classes, and the `contract` that the classes extend."""
HOOKS = ["turnrl_callbacks", "turnrl_commands"]
"""All hooks: functions without parameters that return an iterable.

`turnrl_callbacks` returns makers of Lightning callbacks for every run of `MTGRPO`: classes that
take no argument, or functions of the trainer that return a callback or None.
`turnrl_commands` returns functions that add a command: each gets argparse's sub-parsers, calls
`add_parser`, and sets `run` (a function of the parsed arguments that returns an exit code) with
`set_defaults`.
"""

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""argparse's sub-parsers, to which a command is added."""
_Class = TypeVar("_Class", bound=type)
_T = TypeVar("_T")


def contract(hook: str) -> Callable[[_Class], _Class]:
    """Declare a hook, whose classes all extend the decorated class.

    Args:
        hook: The name of the hook.
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
        name: Entry-point name, as in `TURNRL_LOAD_PLUGINS`.
        distribution: Distribution that brings it.
        version: The distribution's version.
        manager: The pluggy manager in which it is registered by its name.
    """

    name: str
    distribution: str
    version: str
    manager: pluggy.PluginManager = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {self.distribution} {self.version}"

    def error(self, problem: str, cause: BaseException | None = None) -> PluginError:
        """The error about a broken plugin, with its cause and the way to skip it."""
        why = f" ({type(cause).__name__}: {' '.join(str(cause).split())})" if cause else ""
        return PluginError(
            f"{self} {problem}{why}. Fix or uninstall it, or set {LOAD_VARIABLE} to the "
            f"comma-separated plugins to load, without {self.name!r}, to skip it."
        )

    def hook_results(self, hook: str) -> tuple[Any, ...]:
        """The values that it returns from a hook, references to classes and functions among them;
        empty if it does not implement the hook.

        Raises:
            PluginError: If the hook fails.
        """
        impls = getattr(self.manager.hook, hook).get_hookimpls()
        function = next((i.function for i in impls if i.plugin_name == self.name), tuple)
        try:
            return tuple(function())
        except (Exception, SystemExit) as error:
            raise self.error(f"does not return a list from {hook}", error) from error

    def load(self, hook: str, item: object) -> Any:
        """Import what a reference from a hook means; any other value is what it is.

        Raises:
            PluginError: If it cannot be imported, or is of another kind than the hook asks for.
        """
        kind, loaded = KINDS.get(hook), item
        if isinstance(item, str):
            try:
                loaded = pkgutil.resolve_name(item)
            except (Exception, SystemExit) as error:
                raise self.error(f"brings {item!r}, which cannot be imported", error) from error
        if kind is None or (isinstance(loaded, type) and issubclass(loaded, kind)):
            return loaded
        advice = ""
        if inspect.isroutine(loaded):
            path = f"{loaded.__module__}.{loaded.__qualname__}"
            advice = f". Where a recipe may name a function, it names it by its path, {path}"
        raise self.error(
            f"returned {loaded!r} from {hook}, which is not a subclass of {kind.__name__}{advice}"
        )

    def load_components(self, hook: str) -> tuple[Any, ...]:
        """Everything that it returns from a hook, imported; see `load`."""
        return tuple(self.load(hook, item) for item in self.hook_results(hook))


def _entry_points(faults: list[PluginError]) -> dict[str, importlib.metadata.EntryPoint]:
    """The entry points to load, by name. Two distributions may not claim a name for different
    modules.

    Args:
        faults: Gets what is wrong with them.
    """
    points: dict[str, importlib.metadata.EntryPoint] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        first = points.setdefault(point.name, point)
        if first.value != point.value:
            faults.append(
                PluginError(
                    f"two plugins are called {point.name!r}: {first.value} and {point.value}. "
                    "Uninstall one of them."
                )
            )
    value = os.environ.get(LOAD_VARIABLE)
    wanted = set(points) if value is None else {n.strip() for n in value.split(",") if n.strip()}
    if missing := sorted(wanted - set(points)):
        faults.append(
            PluginError(
                f"{LOAD_VARIABLE} asks for {', '.join(missing)}, which no installed distribution "
                f"provides. Installed: {', '.join(sorted(points)) or 'none'}."
            )
        )
    return {name: points[name] for name in sorted(wanted & set(points))}


def _register(plugin: Plugin, module_name: str) -> Plugin:
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise plugin.error("cannot be imported", error) from error
    # pluggy silently ignores hooks that are misspelt or unmarked
    named = {n: v for n, v in vars(module).items() if n.startswith("turnrl_") and callable(v)}
    for name, value in named.items():
        if name not in HOOKS:
            hint = f"{suggest_name(name, HOOKS)} Hooks: {', '.join(sorted(HOOKS))}"
            raise plugin.error(f"defines {name!r}, which is not a hook of turnrl.{hint}")
        if not hasattr(value, f"{GROUP}_impl"):
            raise plugin.error(f"defines {name!r} without '@turnrl.hookimpl'")
    try:
        plugin.manager.register(module, plugin.name)
        plugin.manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        plugin.manager.unregister(name=plugin.name)
        raise plugin.error("does not fit turnrl's hooks", error) from error
    return plugin


@functools.cache
def load_plugins(name: str | None = None) -> list[Plugin]:
    """Import every installed plugin once: turnrl's own, then the others in order of their names.

    Args:
        name: Import only the plugin with this name, if it is installed.
    Raises:
        PluginError: If a plugin cannot be imported or misspells a hook; the message names its
            distribution, its version, the cause and the way to skip it. Also if
            `TURNRL_LOAD_PLUGINS` names a plugin that is not installed.
    """
    faults: list[PluginError] = []
    manager, points = _manager(), _entry_points(faults)
    if faults:
        raise faults[0]
    if name is not None:
        return [_register_entry_point(manager, points[name])] if name in points else []
    return [
        _register_core(manager),
        *(_register_entry_point(manager, point) for point in points.values()),
    ]


def working_plugins(*hooks: str) -> tuple[list[Plugin], list[PluginError]]:
    """The installed plugins that work, and the faults of the others: whoever lists plugins or
    commands must not fail because of one of them.

    Args:
        hooks: The hooks that have to work; calling the others may import torch.
    """
    faults: list[PluginError] = []
    manager, points = _manager(), _entry_points(faults)
    working = [_register_core(manager)]
    for point in points.values():
        try:
            plugin = _register_entry_point(manager, point)
            for hook in hooks:
                plugin.load_components(hook)
        except PluginError as fault:
            faults.append(fault)
        else:
            working.append(plugin)
    return working, faults


def _manager() -> pluggy.PluginManager:
    """A manager that knows all hooks."""
    importlib.import_module("turnrl.types")  # each contract makes its hook known
    manager = pluggy.PluginManager(GROUP)
    spec = pluggy.HookspecMarker(GROUP)(lambda: ())
    manager.add_hookspecs(type("Hooks", (), dict.fromkeys(HOOKS, staticmethod(spec))))
    return manager


def _register_core(manager: pluggy.PluginManager) -> Plugin:
    version = importlib.metadata.version("turnrl")
    return _register(Plugin("core", "turnrl", version, manager), BUILTINS)


def _register_entry_point(
    manager: pluggy.PluginManager, point: importlib.metadata.EntryPoint
) -> Plugin:
    origin = (point.dist.name, point.dist.version) if point.dist else ("unknown", "unknown")
    return _register(Plugin(point.name, *origin, manager), point.value)


def collect_components(hook: str) -> list[Any]:
    """Everything that installed plugins return from a hook, in the plugins' order."""
    return [thing for plugin in load_plugins() for thing in plugin.load_components(hook)]


def _index_components(hook: str) -> dict[str, tuple[Plugin, object]]:
    """The classes that installed plugins return from a hook, by short name, and their plugins.
    References are not imported.

    Raises:
        PluginError: If two plugins bring different classes with the same name.
    """
    offered: dict[str, tuple[Plugin, object]] = {}
    for plugin in load_plugins():
        for item in plugin.hook_results(hook):
            name = _path_of(item).rpartition(":")[2]
            _, first = offered.setdefault(name, (plugin, item))
            if _path_of(first) != _path_of(item):
                raise PluginError(
                    f"two installed classes are called {name!r}: {_path_of(first)} and "
                    f"{_path_of(item)}. Name the one you mean by its full path."
                )
    return offered


def _path_of(item: object) -> str:
    """`module:Class` for a class or a reference to one."""
    if isinstance(item, type):
        return f"{item.__module__}:{item.__qualname__}"
    return item if isinstance(item, str) else repr(item)


def load_classes(hook: str) -> dict[str, type]:
    """Import the classes that installed plugins return from a hook. They are returned by short
    name.

    Raises:
        PluginError: If a plugin returns something else, or two bring different classes with the
            same name.
    """
    return {
        name: plugin.load(hook, item) for name, (plugin, item) in _index_components(hook).items()
    }


def load_class(hook: str, name: str) -> type | None:
    """Import the class with this short name that a plugin returns from a hook, and no other; None
    if there is none."""
    if (offer := _index_components(hook).get(name)) is None:
        return None
    plugin, item = offer
    loaded: type = plugin.load(hook, item)
    return loaded


def import_classes(names: Collection[str]) -> None:
    """Import the classes of installed plugins that have these short names. jsonargparse finds a
    short name only if its class is imported."""
    for hook in KINDS:
        for name in _index_components(hook).keys() & names:
            load_class(hook, name)


def add_module_folder(folder: Path, names: Iterable[str]) -> None:
    """Let Python look for modules in a folder, after all others, if it holds one of these and that
    one is not installed. A folder without such a module is not searched at all: a file in it may
    have the name of a module that some library tries to import.

    Args:
        folder: A folder.
        names: Names of modules, without the packages in them.
    """
    folder = folder.absolute()
    if str(folder) in sys.path:
        return
    for name in names:
        if (folder / f"{name}.py").exists() or (folder / name).exists():
            with contextlib.suppress(ValueError, ImportError):  # a module of another kind
                if importlib.util.find_spec(name) is None:
                    sys.path.append(str(folder))
                    return


def import_object(setting: str, value: str | Callable[..., _T]) -> Callable[..., _T]:
    """The function or class that a recipe or an option names. Its module may lie in the current
    folder.

    Args:
        setting: The setting, for messages.
        value: Its path, such as `my_module.Guess`; from Python, the function or class itself.
    Raises:
        RecipeError: If there is no such function or class.
    """
    target: object = value
    if isinstance(value, str):
        module, _, attribute = value.rpartition(".")
        if not module:
            raise RecipeError(
                f"{setting} is {value!r}, which is not a path. Give the module too, such as "
                f"my_module.{value or 'something'}."
            )
        add_module_folder(Path.cwd(), [module.partition(".")[0]])
        try:
            home = importlib.import_module(module)
        except Exception as error:
            raise RecipeError(
                f"{setting} is {value!r}, which cannot be imported ({summarize_error(error)}). "
                "The module has to be installed, or lie in the current folder."
            ) from error
        if not hasattr(home, attribute):
            near = suggest_name(attribute, vars(home)) or " Correct the name."
            raise RecipeError(
                f"{setting} is {value!r}, and the module {module} has no {attribute!r}.{near}"
            )
        target = getattr(home, attribute)
    if not callable(target):
        raise RecipeError(
            f"{setting} is {value!r:.80}, which cannot be called. Give a class or a function."
        )
    return cast("Callable[..., _T]", target)


def make_lazy(package: str, file: str) -> tuple[Callable[[str], object], list[str]]:
    """The public names of a package that imports them on their first use, because listing plugins
    must not import torch. The package lists them where type checkers read them too:

        if TYPE_CHECKING:
            from my_engine.sampler import Sampler as Sampler

        __getattr__, __all__ = make_lazy(__name__, __file__)

    Args:
        package: The name of the package.
        file: Its `__init__.py`. Each name has a line like the one above, indented by four spaces.
    Returns:
        The package's `__getattr__`, and the names. A stub beside the package, as `lazy_loader`
        reads it, would hide the package's hooks from type checkers.
    """
    source = Path(file).read_text(encoding="utf-8")
    listed = re.findall(r"^    from (\S+) import (\S+) as \2$", source, re.MULTILINE)
    homes = {name: home for home, name in listed}

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return load, [*homes]


def find_class(name: str, known: Mapping[str, type], *kinds: type) -> type:
    """The class that a recipe names.

    Args:
        name: A short name, or the full path of any class.
        known: Classes by short name.
        kinds: It must extend one of these, without abstract methods.
    Raises:
        LookupError: If there is no such class. The message continues "KEY names NAME, ".
    """
    module, _, attribute = name.rpartition(".")
    advice = f" Installed: {', '.join(known) or 'none'}. Or give a path, such as package.MyClass."
    wanted = " or ".join(kind.__name__ for kind in kinds)
    if not module and name not in known:
        if (chosen := os.environ.get(LOAD_VARIABLE)) is not None:
            advice = f" {LOAD_VARIABLE} is {chosen!r}: add the plugin that brings it."
        raise LookupError(f"which is no installed {wanted}.{suggest_name(name, known) or advice}")
    try:
        cls = getattr(importlib.import_module(module), attribute) if module else known[name]
    except Exception as error:  # a module may do anything
        near = suggest_name(attribute, known) or advice
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            near = suggest_name(module, [path.stem for path in Path().glob("*.py")]) or advice
        raise LookupError(f"which cannot be imported ({summarize_error(error)}).{near}") from error
    if not (isinstance(cls, type) and issubclass(cls, kinds)):
        raise LookupError(f"which does not extend {wanted}.{advice}")
    if lacks := ", ".join(sorted(getattr(cls, "__abstractmethods__", ()))):
        raise LookupError(f"which lacks {lacks}. Define what is missing.")
    return cls
