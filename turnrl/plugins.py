"""Plugins: the hooks that packages implement, and how installed packages are found.

A plugin is a module with any of the hooks below, named in its distribution's metadata:

    [project.entry-points.turnrl]
    my-tools = "my_tools"

Every hook returns classes. Importing the module is what makes their short names usable in a recipe.
`TURNRL_LOAD_PLUGINS` restricts which entry points are loaded (comma-separated names; empty for
none), which is also the way round a plugin that is broken.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pluggy

from turnrl.errors import PluginError
from turnrl.types import QuestionSource, Reward, Segmenter, Tool

GROUP = "turnrl"
LOAD_VARIABLE = "TURNRL_LOAD_PLUGINS"

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


class Hooks:
    """The hooks a plugin may implement; each returns an iterable of classes."""

    @hookspec
    def turnrl_tools(self) -> Iterable[type[Tool]]:  # type: ignore[empty-body]
        """Tools that the policy can call."""

    @hookspec
    def turnrl_segmenters(self) -> Iterable[type[Segmenter]]:  # type: ignore[empty-body]
        """Turn schemes."""

    @hookspec
    def turnrl_rewards(self) -> Iterable[type[Reward]]:  # type: ignore[empty-body]
        """Turn rewards and outcome rewards."""

    @hookspec
    def turnrl_datasets(self) -> Iterable[type[QuestionSource]]:  # type: ignore[empty-body]
        """Data sets that come with a package."""

    @hookspec
    def turnrl_commands(self) -> Iterable[Callable[[Any], None]]:  # type: ignore[empty-body]
        """Functions that add a command: each gets argparse's sub-parsers, calls `add_parser`, and
        sets `run` (a function of the parsed arguments that returns an exit code) with
        `set_defaults`."""


KINDS: dict[str, type] = {
    "turnrl_tools": Tool,
    "turnrl_segmenters": Segmenter,
    "turnrl_rewards": Reward,
    "turnrl_datasets": QuestionSource,
}
"""What each class-returning hook must return subclasses of."""


@dataclass(frozen=True)
class Plugin:
    """An installed plugin.

    Args:
        name: Entry-point name, which `TURNRL_LOAD_PLUGINS` takes.
        distribution: Distribution that brings it.
        version: The distribution's version.
        components: Classes by hook name; commands are counted under `turnrl_commands` by function
            name.
    """

    name: str
    distribution: str
    version: str
    components: dict[str, tuple[type, ...]]
    commands: tuple[Callable[[Any], None], ...] = ()


def _wanted() -> set[str] | None:
    value = os.environ.get(LOAD_VARIABLE)
    return None if value is None else {name.strip() for name in value.split(",") if name.strip()}


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """Entry points by name. Two distributions may not claim one name for different modules."""
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        known = found.setdefault(point.name, point)
        if known.value != point.value:
            raise PluginError(
                f"two plugins are called {point.name!r}: {known.value} and {point.value}. "
                "Uninstall one of them."
            )
    return found


def _load(manager: pluggy.PluginManager, point: importlib.metadata.EntryPoint) -> Plugin:
    distribution = point.dist.name if point.dist else "unknown distribution"
    version = point.dist.version if point.dist else "unknown version"
    label = f"plugin {point.name!r} of {distribution} {version}"
    others = (
        f"set {LOAD_VARIABLE} to the comma-separated plugins to load, "
        f"without {point.name!r}, to skip it"
    )
    try:
        module = importlib.import_module(point.value)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise PluginError(
            f"{label} cannot be imported ({cause}). Fix or uninstall it, or {others}."
        ) from error
    hooks = {name for name in vars(Hooks) if name.startswith("turnrl_")}
    # pluggy matches hooks by name, so a misspelt one without the marker would be silently unused
    for name in vars(module):
        if name.startswith("turnrl_") and name not in hooks and callable(getattr(module, name)):
            near = difflib.get_close_matches(name, hooks, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise PluginError(
                f"{label} defines {name!r}, which is no hook of turnrl{hint} "
                f"Hooks: {', '.join(sorted(hooks))}. Rename it, or {others}."
            )
    unmarked = [
        n
        for n in hooks
        if callable(getattr(module, n, None)) and not hasattr(getattr(module, n), "turnrl_impl")
    ]
    if unmarked:
        raise PluginError(
            f"{label} defines {unmarked[0]!r} without '@turnrl.hookimpl'. Add it, or {others}."
        )
    try:
        manager.register(module, point.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        cause = " ".join(str(error).split())
        raise PluginError(
            f"{label} does not fit turnrl's hooks ({cause}). Fix it, or {others}."
        ) from error
    components: dict[str, tuple[type, ...]] = {}
    for hook, kind in KINDS.items():
        implementation = getattr(module, hook, None)
        if implementation is None:
            continue
        classes = _called(implementation, hook, label, others)
        for cls in classes:
            if not (isinstance(cls, type) and issubclass(cls, kind)):
                raise PluginError(
                    f"{label}: {hook} returned {cls!r}, which is not a subclass of "
                    f"{kind.__name__}. Fix it, or {others}."
                )
        components[hook] = classes
    commands: tuple[Any, ...] = ()
    if hasattr(module, "turnrl_commands"):
        commands = _called(module.turnrl_commands, "turnrl_commands", label, others)
    return Plugin(point.name, distribution, version, components, commands)


def _called(
    hook: Callable[[], Iterable[Any]], name: str, label: str, others: str
) -> tuple[Any, ...]:
    try:
        return tuple(hook())
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise PluginError(
            f"{label}: {name} does not return a list ({cause}). Fix it, or {others}."
        ) from error


@functools.cache
def load_plugins() -> tuple[Plugin, ...]:
    """Import every installed plugin once, in the order of their names.

    Raises:
        PluginError: Naming the distribution, its version, the cause and how to skip it, if a plugin
            cannot be imported, misspells a hook, or returns something that is not a component; or
            naming what `TURNRL_LOAD_PLUGINS` asks for in vain.
    """
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(Hooks)
    points, wanted = _entry_points(), _wanted()
    missing = sorted((wanted or set()) - set(points))
    if missing:
        raise PluginError(
            f"{LOAD_VARIABLE} asks for {', '.join(missing)}, which no installed distribution "
            f"provides. Installed: {', '.join(sorted(points)) or 'none'}."
        )
    return tuple(
        _load(manager, points[name]) for name in sorted(points) if wanted is None or name in wanted
    )


def installed(hook: str) -> dict[str, type]:
    """Classes that installed plugins return from a hook, by short name.

    Raises:
        PluginError: If two plugins bring different classes of one name.
    """
    classes: dict[str, type] = {}
    for plugin in load_plugins():
        for cls in plugin.components.get(hook, ()):
            if classes.setdefault(cls.__name__, cls) is not cls:
                raise PluginError(
                    f"two installed classes are called {cls.__name__!r}: "
                    f"{classes[cls.__name__].__module__} and "
                    f"{cls.__module__}. Name the one you mean by its full path."
                )
    return classes
