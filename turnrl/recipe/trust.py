"""What a stranger's run or recipe can do, and the mark by which a user's own runs are known.

A recipe names classes, functions and programs, so building it runs them. Turnrl, installed plugins,
and the optimisers, callbacks and loggers of torch and Lightning are trusted. Everything else may
come with the recipe, and needs the user's consent unless the recipe is the user's own. So do
servers elsewhere, which would get the user's questions and keys, and variables that may hold keys.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import secrets
import sys
import tempfile
from collections.abc import Collection, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import yaml

from turnrl.plugin.errors import RecipeError
from turnrl.plugin.hooks import GROUP, add_module_folder
from turnrl.plugin.text import make_visible, say_once
from turnrl.recipe.bundled import bundled_recipes
from turnrl.recipe.merging import (
    Contents,
    expand_variables,
    map_values,
    may_be_secret,
    variable_names,
)
from turnrl.runs.config import load_yaml

TRUST = "--trust"
"""The option by which a user agrees to run the code that a stranger's recipe names."""
_PROGRAMS = ("python", "command")
"""Settings that name a program."""
_UNREAD_PROGRAM = re.compile(rf"\b({'|'.join(_PROGRAMS)})\W*:")
_LIBRARIES = (
    *("torch.optim", "lightning.pytorch.callbacks", "lightning.pytorch.loggers"),
    *("lightning.pytorch.trainer", "lightning.pytorch.strategies", "lightning.pytorch.profilers"),
)
"""Packages of other libraries whose classes a recipe may name."""
_OF_A_RUN = ("record", "metrics.csv")  # a run without a logger leaves checkpoints/ in any folder
_MARK = "# written here by turnrl: "
_NAME = re.compile(r"[^\W\d]\w*(?:[.:][^\W\d][\w-]*)+")
"""A dotted path, or the name of an environment after its module: `my_module:Maze-v0`."""


def mark_text(text: str) -> str:
    """The text of a recipe with a last line by which `is_marked` knows it.

    The line is a digest that needs a key in the user's state folder, so nobody else can write it.
    Without such a folder there is no line.
    """
    key = _key()
    return text if key is None else f"{text}{_MARK}{_digest(key, text)}\n"


def is_marked(text: str) -> bool:
    """True if this user's turnrl has written the text of a recipe, and nobody has changed it."""
    before, mark, digest = text.rpartition(_MARK)
    key = _key() if mark else None
    own = "" if key is None else _digest(key, before)
    return key is not None and hmac.compare_digest(own.encode(), digest.strip().encode())


def _digest(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key() -> bytes | None:
    """The key of the user's marks, made on the first use; None if it cannot be kept."""
    try:
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        file = Path(home, "turnrl", "key")
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            # only its owner can read a file of `mkstemp`; a link never replaces another's key
            number, new = tempfile.mkstemp(dir=file.parent)
            os.write(number, secrets.token_bytes(32))
            os.close(number)
            try:
                os.link(new, file)
            except FileExistsError:
                pass
            finally:
                Path(new).unlink()
        return file.read_bytes() or None
    except (OSError, RuntimeError):
        return None


def is_own(file: Path, text: str) -> bool:
    """True if a recipe is the user's own: turnrl has written it here, or it is bundled, or it lies
    in the current folder or below and belongs to no run."""
    if is_marked(text) or file in bundled_recipes().values():
        return True
    of_run = file.name == "config.yaml" or any((file.parent / n).exists() for n in _OF_A_RUN)
    return not of_run and file.resolve().is_relative_to(Path.cwd())


def find_untrusted(contents: Contents, folders: Sequence[str]) -> dict[str, str]:
    """What a recipe names that takes trust, by key: code outside of turnrl, installed plugins and
    trusted libraries, servers elsewhere, and variables that may hold keys.

    Args:
        contents: The recipe.
        folders: Folders in which modules are looked up, beside the installed ones.
    """
    found = dict[str, str]()

    def look(value: object, key: str) -> object:
        key = key.replace(".init_args", "").lstrip(".")
        filled = os.path.expandvars(value) if isinstance(value, str) else value
        for name in {*find_names(value), *find_names(filled)}:
            if _exists(re.split("[.:]", name)[0], folders) and not _is_trusted(name):
                found[key] = name
        if isinstance(value, str) and (_is_program(key, value) or _is_external(key, value)):
            found[key] = value
        inner = _as_yaml(value) if isinstance(value, str) else value
        if inner != value and isinstance(inner, str | dict | list):
            map_values(inner, look, key)
        return value

    map_values(contents, look)
    return found


def _is_program(key: str, value: str) -> bool:
    """True if a setting names a program."""
    name = re.sub(r"\[\d+\]$", "", key).rpartition(".")[2]
    if name not in _PROGRAMS or key == "command":  # with which a run notes its own
        return _as_yaml(value) is None and bool(_UNREAD_PROGRAM.search(value))
    return True


def _is_external(key: str, value: str) -> bool:
    """True if a setting is the address of a server elsewhere, or may hold a key of the user's."""
    if re.match(r"\s*(https?|wss?)://", value, re.IGNORECASE):
        from turnrl.plugin.patience import is_loopback  # loads asyncio, and is seldom needed

        if not is_loopback(os.path.expandvars(value)):
            return True
    return any(map(may_be_secret, variable_names(value))) and expand_variables(value, key) != value


def _as_yaml(text: str) -> object:
    """The contents of a text as jsonargparse may read it; None if it is no YAML."""
    try:
        return load_yaml(text)
    except yaml.YAMLError:
        return None


def find_names(value: object) -> Collection[str]:
    """The dotted paths in a value of a recipe. jsonargparse reads a text as YAML too."""
    if not isinstance(value, str):
        return ()
    if isinstance(read := _as_yaml(value), str):
        return {text for text in (value.strip(), read) if _NAME.fullmatch(text)}
    return set(_NAME.findall(value))


def _exists(top: str, folders: Sequence[str]) -> bool:
    """True if there is a module or package of this name, installed or in one of the folders."""
    try:
        spec = importlib.util.find_spec(top) or PathFinder.find_spec(top, [*folders])
    except (ValueError, ImportError):  # the module that runs as a program may have no spec
        return top in sys.modules
    return spec is not None


def _is_trusted(name: str) -> bool:
    """True if a dotted path means a class that turnrl, an installed plugin or a trusted library
    defines. Only their modules are imported to find out."""
    points = importlib.metadata.entry_points(group=GROUP)
    tops = (*_LIBRARIES, "turnrl", *{point.module.split(".")[0] for point in points})
    trusted = tuple(f"{top}." for top in tops)
    if ":" in name or not name.startswith(trusted):
        return False
    try:
        meant = pkgutil.resolve_name(name)
    except Exception:  # whatever an import raises
        return False
    return isinstance(meant, type) and f"{meant.__module__}.".startswith(trusted)


def require_consent(where: str, contents: Contents, folder: Path, trusts: bool) -> None:
    """Name what a stranger's recipe would run, ask or use, and refuse it unless the user agrees.

    Args:
        where: The run, checkpoint or recipe, for messages.
        contents: Its recipe.
        folder: The folder in which the recipe lies.
        trusts: True if the user agrees.
    Raises:
        RecipeError: With everything that is named.
    """
    named = find_untrusted(contents, (str(Path.cwd()), str(folder.absolute())))
    if not named:
        return
    listed = ", ".join(f"{key}: {make_visible(name):.200}" for key, name in named.items())
    if not trusts:
        raise RecipeError(
            f"{where!r} was not written by you on this machine, and it would run code of no "
            f"installed plugin, ask a server elsewhere, or use your variables ({listed}). Look at "
            f"each. If you trust them, repeat the command with {TRUST}; in Python, "
            "turnrl.load(..., trust=True)."
        )
    say_once(f"turnrl: runs or asks what {where!r} names: {listed}")


def import_from(contents: Contents, *folders: Path) -> None:
    """Make modules importable that a recipe names and that lie in these folders; see
    `add_module_folder`."""
    tops = set[str]()

    def look(value: object, key: str) -> object:
        tops.update(re.split("[.:]", name)[0] for name in find_names(value))
        return value

    map_values(contents, look)
    for folder in folders:
        add_module_folder(folder, tops)
