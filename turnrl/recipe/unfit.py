"""Checks a recipe before torch is imported: the keys at any depth, and plain values.

What a class takes is read from its source code (source.py). Where that leaves a doubt (a class that
changes the settings it passes on, a name that two classes have) the recipe passes, and jsonargparse
decides later.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Optional, Union

from turnrl.data.rows import FILE_KINDS
from turnrl.errors import RecipeError, did_you_mean
from turnrl.recipe.explain import explain, is_plain
from turnrl.recipe.keys import elsewhere, unknown_key
from turnrl.recipe.merging import PARTS, Contents
from turnrl.recipe.reading import MAPPINGS
from turnrl.recipe.source import Class, Source, last_name, members_of, names_of

_OPEN = ("dict", "Mapping", "MutableMapping", "Any", "object")
"""Types whose values may be a mapping with any keys."""
_FUNCTION = "Callable[..., Any]"
"""The type of a setting that a function may be given for, by its dotted path."""
_EXTENDED = {
    "Toolset": ("Tool", "Toolset"),
    "Reward": ("OutcomeReward", "TurnReward"),
    "QuestionSource": ("QuestionSource",),
}
"""The classes that a user's own extends, for each contract in whose place a function may stand."""
_BUILT_IN = {
    **{kind.__name__: kind for kind in (bool, int, float, str, list, tuple)},
    **{"Literal": Literal, "Optional": Optional, "Union": Union, "List": list, "Tuple": tuple},
    "__builtins__": {},
}
"""Names of types whose values can be checked before anything is imported."""


def refuse_unfit(
    contents: Contents,
    sections: Sequence[str],
    kinds: Mapping[str, object],
    recipes: Sequence[str],
) -> None:
    """Refuse unknown keys in a recipe, in its sections and in its components at any depth; and
    texts, numbers and switches that do not fit the types of their keys.

    Args:
        contents: Recipes and options, merged.
        sections: The keys at the top of every recipe.
        kinds: Types of the keys at the top that are not sections.
        recipes: The files. The user's own classes may lie beside them.
    Raises:
        RecipeError: Naming the key, and what to write.
    """
    known = list(dict.fromkeys([*sections, *kinds]))
    folders = (str(Path.cwd()), *(str(Path(file).absolute().parent) for file in recipes))
    checked = _Checked(Source(folders))
    for key, value in ((str(key), value) for key, value in contents.items()):
        if key not in known:
            near = did_you_mean(key, known) or _synonym(key, value)
            near = near or did_you_mean(key, checked.homes(key))
            raise RecipeError(f"unknown key {key!r}.{near} There are {', '.join(known)}.")
        if value is not None and key in kinds and is_plain(kinds[key]):
            checked.plain.append((value, kinds[key], key))
    for section, default in MAPPINGS.items():
        settings = contents.get(section) or {}
        described = {"class_path": default, "init_args": settings}
        if "class_path" in settings:
            described = settings
        own = str(described["class_path"]).rpartition(".")[2] != default.rpartition(".")[2]
        checked.refuse(described, section, component=own)
    for value, kind, key in checked.plain:
        if fault := explain(value, kind, key):
            raise RecipeError(fault)


def _synonym(key: str, value: object) -> str:
    """` Set model.group_size instead.` for a key of another library, or for a mapping that has one,
    or the reason why turnrl does not have it; else nothing."""
    for name in (key, *_keys_below(value)):
        if there := elsewhere(name, "" if name == key else f" of {name}"):
            return there
    return ""


def _keys_below(value: object) -> Iterator[str]:
    for name, item in value.items() if isinstance(value, Mapping) else ():
        yield str(name)
        yield from _keys_below(item)


class _Checked:
    """A recipe's settings, checked against the source code of their classes.

    Args:
        source: The source code.
    Attributes:
        plain: Values whose types need no import, with those types and their keys. They are checked
            last, because that is slower than to check all keys.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.plain: list[tuple[object, object, str]] = []

    def homes(self, key: str) -> Iterator[str]:
        """The settings of this name in the sections of a recipe."""
        for section, path in MAPPINGS.items():
            root = self.source.at(path)
            if root is not None and key in (self.source.parameters(root) or ()):
                yield f"{section}.{key}"

    def refuse(self, described: Contents, key: str, component: bool = True, skip: int = 0) -> None:
        """Refuse a key that a class does not have, or one below it.

        Args:
            described: `class_path` and perhaps `init_args`.
            key: Where the class stands in the recipe.
            component: True if the recipe named the class.
            skip: How many of its first parameters the recipe does not set.
        """
        name, settings = described["class_path"], described.get("init_args") or {}
        if isinstance(name, str) and isinstance(settings, Mapping) and {*described} <= PARTS:
            owner = self.source.at(name) if "." in name else self.source.short(name)
            if owner is not None:
                self._refuse_in(settings, owner, key, component, skip)

    def _refuse_in(
        self, settings: Contents, owner: Class, key: str, component: bool, skip: int = 0
    ) -> None:
        parameters = self.source.parameters(owner)
        if parameters is None:
            return
        known = dict([*parameters.items()][skip:])
        for name, item in settings.items():
            if not isinstance(name, str) or "." in name:  # jsonargparse may take it
                continue
            if name not in known:
                raise RecipeError(unknown_key(f"{key}.{name}", known, owner.node.name, component))
            if (kind := known[name]) is None:
                continue
            plain = None if item is None or isinstance(item, Mapping) else _plain_type(kind)
            if plain is not None:
                self.plain.append((item, plain, f"{key}.{name}"))
            self._refuse_below(item, kind, owner.module, f"{key}.{name}")

    def _refuse_below(self, item: object, kind: ast.expr, module: str, key: str) -> None:
        if isinstance(item, list):
            for number, one in enumerate(item):
                self._refuse_below(one, kind, module, f"{key}[{number}]")
        kinds = [ast.unparse(one) for one in members_of(kind)]
        path = item.get("class_path") if isinstance(item, Mapping) else item
        if isinstance(path, str) and _FUNCTION in kinds:
            self._refuse_name(path, key, doubtful="str" in kinds)
            self._refuse_class(path, kind, module, key)
        if isinstance(item, Mapping) and "class_path" in item:
            # a function's first parameter is not the recipe's: turnrl passes it
            self.refuse(item, key, skip=int(ast.unparse(kind).startswith("Callable[")))
        elif isinstance(item, Mapping) and not PARTS & {*item}:
            members = [*members_of(kind)]
            if any(isinstance(one, ast.Subscript) or last_name(one) in _OPEN for one in members):
                return  # the value may be a dictionary
            named = (self.source.meant(module, one) for one in members)
            plain = {"final", "dataclass"}  # any other has a class_path
            sections = [one for one in named if one is not None and one.decorators & plain]
            if len(sections) == 1:
                self._refuse_in(item, sections[0], key, component=False)

    def _refuse_name(self, path: str, key: str, doubtful: bool) -> None:
        """Refuse the dotted path of a class or function that is in no module here. If it is
        `doubtful` that a path is meant, because a name of another kind may stand there, a module
        that is not here is refused only if a similar one is.
        """
        module, _, name = path.rpartition(".")
        is_path = re.fullmatch(r"[^\W\d]\w*(\.\w+)*", module) and not Path(path).exists()
        if not is_path or f".{name.lower()}" in FILE_KINDS:
            return
        if (file := self.source.file(module)) is None:
            if self.source.spec(module.partition(".")[0]) is None:
                files = (file for place in self.source.places for file in Path(place).glob("*.py"))
                near = did_you_mean(module, [one.stem for one in files])
                if doubtful and not near:
                    return
                raise RecipeError(
                    f"{key} names {path!r}, and there is no module {module!r} in this folder or "
                    f"beside the recipe.{near} Correct the name, or install the package."
                )
            return
        names = names_of(file)
        if names is not None and name not in names:
            raise RecipeError(
                f"{key} names {path!r}, and {file.name} has no {name!r}."
                f"{did_you_mean(name, names) or ' Correct the name.'}"
            )

    def _refuse_class(self, path: str, kind: ast.expr, module: str, key: str) -> None:
        """Refuse a class that extends none of the contracts that a type names."""
        owner = self.source.at(path) if "." in path else None
        members = [self.source.meant(module, one) for one in members_of(kind)]
        contracts = [one for one in members if one is not None and one.node.name in _EXTENDED]
        if owner is None or not contracts or self.source.extends(owner, contracts) is not False:
            return
        name = owner.node.name
        bases = [base for one in contracts for base in _EXTENDED[one.node.name]]
        methods = [one.name for one in owner.node.body if isinstance(one, ast.FunctionDef)]
        if "Toolset" in bases and "reset" in methods:
            form, takes = ("Gymnasium", "make") if "step" in methods else ("Environment",) * 2
            raise RecipeError(
                f"{key} names the class {path!r}, which is not a tool. It has reset, so it may be "
                f"an environment: {{class_path: {form}, init_args: {{{takes.lower()}: {path}}}}}."
            )
        raise RecipeError(
            f"{key} names the class {path!r}, which does not extend {' or '.join(bases)}. Write "
            f"'class {name}(turnrl.{bases[0]}):', or name a function, such as my_module.function."
        )


def _plain_type(kind: ast.expr) -> object:
    """The type that an annotation spells with `_BUILT_IN` alone; None if it needs other names."""
    try:
        spelt = eval(ast.unparse(kind), _BUILT_IN)
    except Exception:
        return None
    return None if isinstance(spelt, str) else spelt
