"""Checks a recipe before torch is imported: the keys at any depth, and plain values.

The parameters of a class are read from its source code (source.py). If that leaves a doubt (a class
changes the settings that it passes on, or two classes have the name), the recipe passes, and
jsonargparse decides later.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Optional, Union

from turnrl.data.files import file_kind
from turnrl.errors import RecipeError, did_you_mean
from turnrl.recipe.explain import explain, is_plain
from turnrl.recipe.keys import elsewhere, unknown_key
from turnrl.recipe.merging import PARTS, Contents, filled_in
from turnrl.recipe.reading import MAPPINGS
from turnrl.recipe.source import Class, Source, last_name, members_of, names_of

_OPEN = ("dict", "Mapping", "MutableMapping", "Any", "object")
"""Types whose values may be a mapping with any keys."""
_FUNCTION = "Callable[..., Any]"
"""The type of a setting that also takes a function, by its dotted path."""
_EXTENDED = {
    "Toolset": ("Tool", "Toolset"),
    "Reward": ("OutcomeReward", "TurnReward"),
    "QuestionSource": ("QuestionSource",),
}
"""For each contract that a function can replace, the classes that a user's own class extends."""
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
    """Refuse unknown keys in a recipe, in its sections and in its components at any depth. Also
    refuse texts, numbers and booleans that do not fit the types of their keys.

    Args:
        contents: Recipes and options, merged.
        sections: The keys at the top of every recipe.
        kinds: Types of the keys at the top that are not sections.
        recipes: The files of the recipes. The user's own classes may lie beside them.
    Raises:
        RecipeError: If there is such a key or value. The message names it, and what to write.
    """
    top_keys = list(dict.fromkeys([*sections, *kinds]))
    folders = (str(Path.cwd()), *(str(Path(file).absolute().parent) for file in recipes))
    checked = _Checked(Source(folders))
    for key, value in ((str(key), value) for key, value in contents.items()):
        if key not in top_keys:
            near = did_you_mean(key, top_keys) or _synonym(key, value)
            near = near or did_you_mean(key, checked.homes(key))
            raise RecipeError(f"unknown key {key!r}.{near} There are {', '.join(top_keys)}.")
        if value is not None and key in kinds and is_plain(kinds[key]):
            checked.plain.append((value, kinds[key], key))
    for section, default in MAPPINGS.items():
        settings = contents.get(section) or {}
        described = {"class_path": default, "init_args": settings}
        if "class_path" in settings:
            described = settings
        is_own = str(described["class_path"]).rpartition(".")[2] != default.rpartition(".")[2]
        checked.refuse(described, section, component=is_own)
    for value, kind, key in checked.plain:
        fault = explain(value, kind, key)  # which shows a variable's name, and not its value
        if fault and explain(filled_in(value, key), kind, key):
            raise RecipeError(fault)


def _synonym(key: str, value: object) -> str:
    """` Set model.group_size instead.` for a key of another library, or for a mapping that has such
    a key; or the reason why turnrl does not have it. Else an empty text."""
    for name in (key, *_keys_below(value)):
        if advice := elsewhere(name, "" if name == key else f" of {name}"):
            return advice
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
        plain: Values whose types need no import, each with its type and its key. They are checked
            last, because that takes longer than checking all keys.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.plain: list[tuple[object, object, str]] = []

    def homes(self, key: str) -> Iterator[str]:
        """The settings with this name in the sections of a recipe."""
        for section, path in MAPPINGS.items():
            root = self.source.at(path)
            if root is not None and key in (self.source.parameters(root) or ()):
                yield f"{section}.{key}"

    def refuse(self, described: Contents, key: str, component: bool = True, skip: int = 0) -> None:
        """Refuse a key that a class does not have, or one below it.

        Args:
            described: `class_path` and perhaps `init_args`.
            key: The key of the class in the recipe.
            component: True if the recipe named the class.
            skip: Number of first parameters that the recipe does not set.
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
        kinds = dict([*parameters.items()][skip:])
        for name, item in settings.items():
            if not isinstance(name, str) or "." in name:  # jsonargparse may take it
                continue
            if name not in kinds:
                raise RecipeError(unknown_key(f"{key}.{name}", kinds, owner.node.name, component))
            if (kind := kinds[name]) is None:
                continue
            plain = None if item is None or isinstance(item, Mapping) else _plain_type(kind)
            if plain is not None:
                self.plain.append((item, plain, f"{key}.{name}"))
            self._refuse_below(item, kind, owner.module, f"{key}.{name}")

    def _refuse_below(self, item: object, kind: ast.expr, module: str, key: str) -> None:
        if isinstance(item, list):
            for number, element in enumerate(item):
                self._refuse_below(element, kind, module, f"{key}[{number}]")
        kinds = [ast.unparse(member) for member in members_of(kind)]
        path = item.get("class_path") if isinstance(item, Mapping) else item
        if isinstance(path, str) and _FUNCTION in kinds:
            self._refuse_name(path, key, doubtful="str" in kinds)
            self._refuse_class(path, kind, module, key)
        if isinstance(item, Mapping) and "class_path" in item:
            # turnrl itself passes the first parameter of a callable
            self.refuse(item, key, skip=int(ast.unparse(kind).startswith("Callable[")))
        elif isinstance(item, Mapping) and not PARTS & {*item}:
            members = [*members_of(kind)]
            if any(isinstance(m, ast.Subscript) or last_name(m) in _OPEN for m in members):
                return  # the value may be a dictionary
            classes = (self.source.meant(module, member) for member in members)
            marks = {"final", "dataclass"}  # any other class needs a class_path
            sections = [cls for cls in classes if cls is not None and cls.decorators & marks]
            if len(sections) == 1:
                self._refuse_in(item, sections[0], key, component=False)

    def _refuse_name(self, path: str, key: str, doubtful: bool) -> None:
        """Refuse the dotted path of a class or function that does not exist here. If `doubtful`,
        the setting also takes other texts: then a path in a missing module is refused only if a
        module with a similar name is here.
        """
        module, _, name = path.rpartition(".")
        is_path = re.fullmatch(r"[^\W\d]\w*(\.\w+)*", module) and not Path(path).exists()
        if not is_path or file_kind(path):
            return
        if (file := self.source.file(module)) is None:
            if self.source.spec(module.partition(".")[0]) is None:
                files = (
                    file for folder in self.source.folders for file in Path(folder).glob("*.py")
                )
                near = did_you_mean(module, [file.stem for file in files])
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
        members = [self.source.meant(module, member) for member in members_of(kind)]
        contracts = [cls for cls in members if cls is not None and cls.node.name in _EXTENDED]
        if owner is None or not contracts or self.source.extends(owner, contracts) is not False:
            return
        name = owner.node.name
        bases = [base for contract in contracts for base in _EXTENDED[contract.node.name]]
        methods = [node.name for node in owner.node.body if isinstance(node, ast.FunctionDef)]
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
    """The type of an annotation that only uses names of `_BUILT_IN`; None for other annotations."""
    try:
        plain = eval(ast.unparse(kind), _BUILT_IN)
    except Exception:
        return None
    return None if isinstance(plain, str) else plain
