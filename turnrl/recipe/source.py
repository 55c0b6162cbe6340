"""Checks a recipe before torch is imported: the keys at any depth, and plain values.

The classes that a recipe describes are read from their source code, and nothing is imported. Where
that leaves a doubt (a class that changes the settings it passes on, a name that two classes have)
the recipe passes, and jsonargparse decides later.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Literal, Optional, Union

from turnrl.data.rows import FILE_KINDS
from turnrl.errors import RecipeError, did_you_mean
from turnrl.recipe.explain import explain, is_plain
from turnrl.recipe.keys import elsewhere, unknown_key
from turnrl.recipe.merging import PARTS, Contents

_ROOTS = {
    "model": "turnrl.MTGRPO",
    "data": "turnrl.QuestionData",
    "trainer": "lightning.pytorch.trainer.trainer.Trainer",
    "record": "turnrl.Recorder",
    "plan": "turnrl.Plan",
}
"""Classes of a recipe that names none."""
_LIBRARIES = {"torch": ["optim"], "lightning": ["pytorch/callbacks", "pytorch/loggers"]}
"""Folders of other libraries whose classes a recipe may name without their module."""
_SEVERAL = ("Adafactor",)
"""Names of classes that two libraries have."""
_EMPTY = ("ABC", "object", "Generic", "Protocol")
"""Bases whose instances are made without arguments."""
_OPEN = ("dict", "Mapping", "MutableMapping", "Any", "object")
"""Types whose values may be a mapping with any keys."""
_PLAIN = ("final", "dataclass", "contract")
"""Decorators that leave a class's arguments as its source writes them."""
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
    source = Source((str(Path.cwd()), *(str(Path(file).absolute().parent) for file in recipes)))
    for key, value in ((str(key), value) for key, value in contents.items()):
        if key not in known:
            near = did_you_mean(key, known) or _synonym(key, value)
            near = near or did_you_mean(key, source.homes(key))
            raise RecipeError(f"unknown key {key!r}.{near} There are {', '.join(known)}.")
        if value is not None and key in kinds and is_plain(kinds[key]):
            source.plain.append((value, kinds[key], key))
    for section, default in _ROOTS.items():
        settings = contents.get(section) or {}
        described = {"class_path": default, "init_args": settings}
        if "class_path" in settings:
            described = settings
        own = str(described["class_path"]).rpartition(".")[2] != default.rpartition(".")[2]
        source.refuse(described, section, component=own)
    for value, kind, key in source.plain:
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


@dataclass(frozen=True)
class _Class:
    """A class in source code."""

    module: str
    node: ast.ClassDef

    @property
    def decorators(self) -> set[str]:
        return {_last(one) for one in self.node.decorator_list}


_Parameters = dict[str, ast.expr | None]
"""Parameters by name, with their types as the source writes them."""


class Source:
    """Source code of the classes that recipes name.

    Args:
        places: Folders with modules that are not installed.
    Attributes:
        plain: Values that `refuse` has come across whose types need no import, with those types and
            their keys. They are checked last, because that is slower than to check all keys.
    """

    def __init__(self, places: Sequence[str]) -> None:
        self._places = places
        self._statements = functools.cache(self._read)
        self.plain: list[tuple[object, object, str]] = []

    def homes(self, key: str) -> Iterator[str]:
        """The settings of this name in the sections of a recipe."""
        for section, path in _ROOTS.items():
            root = self.at(path)
            if root is not None and key in (self.parameters(root) or ()):
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
            owner = self.at(name) if "." in name else self.short(name)
            if owner is not None:
                self._refuse_in(settings, owner, key, component, skip)

    def _refuse_in(
        self, settings: Contents, owner: _Class, key: str, component: bool, skip: int = 0
    ) -> None:
        parameters = self.parameters(owner)
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
        kinds = [ast.unparse(one) for one in _members(kind)]
        path = item.get("class_path") if isinstance(item, Mapping) else item
        if isinstance(path, str) and _FUNCTION in kinds:
            self._refuse_name(path, key, doubtful="str" in kinds)
            self._refuse_class(path, kind, module, key)
        if isinstance(item, Mapping) and "class_path" in item:
            # a function's first parameter is not the recipe's: turnrl passes it
            self.refuse(item, key, skip=int(ast.unparse(kind).startswith("Callable[")))
        elif isinstance(item, Mapping) and not PARTS & {*item}:
            members = [*_members(kind)]
            if any(isinstance(one, ast.Subscript) or _last(one) in _OPEN for one in members):
                return  # the value may be a dictionary
            named = (self._meant(module, one) for one in members)
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
        if (file := self._file(module)) is None:
            if self._spec(module.partition(".")[0]) is None:
                files = (file for place in self._places for file in Path(place).glob("*.py"))
                near = did_you_mean(module, [one.stem for one in files])
                if doubtful and not near:
                    return
                raise RecipeError(
                    f"{key} names {path!r}, and there is no module {module!r} in this folder or "
                    f"beside the recipe.{near} Correct the name, or install the package."
                )
            return
        names = _names_of(file)
        if names is not None and name not in names:
            raise RecipeError(
                f"{key} names {path!r}, and {file.name} has no {name!r}."
                f"{did_you_mean(name, names) or ' Correct the name.'}"
            )

    def _refuse_class(self, path: str, kind: ast.expr, module: str, key: str) -> None:
        """Refuse a class that extends none of the contracts that a type names."""
        owner = self.at(path) if "." in path else None
        members = [self._meant(module, one) for one in _members(kind)]
        contracts = [one for one in members if one is not None and one.node.name in _EXTENDED]
        if owner is None or not contracts or self._extends(owner, contracts) is not False:
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

    def _extends(self, owner: _Class, contracts: Sequence[_Class]) -> bool | None:
        """True if a class extends one of the others, at any depth; None if its source leaves a
        doubt."""
        if owner in contracts:
            return True
        bases = [one.value if isinstance(one, ast.Subscript) else one for one in owner.node.bases]
        found = [self._meant(owner.module, one) for one in bases if _last(one) not in _EMPTY]
        known = [None if one is None else self._extends(one, contracts) for one in found]
        return True if True in known else None if None in known else False

    def parameters(self, owner: _Class) -> _Parameters | None:
        """The parameters of a class's constructor; None if its source leaves a doubt."""
        made = {one.name: one for one in owner.node.body if isinstance(one, ast.FunctionDef)}
        if owner.decorators - {*_PLAIN} or "__new__" in made:
            return None
        if init := made.get("__init__"):
            args = init.args
            named = [*args.posonlyargs, *args.args][1:] + args.kwonlyargs
            passed = self._passed_on(owner, init, args.kwarg.arg) if args.kwarg else {}
            return None if passed is None else {one.arg: one.annotation for one in named} | passed
        inherited = self._inherited(owner)
        if inherited is None or "dataclass" not in owner.decorators:
            return inherited
        return inherited | {
            one.target.id: one.annotation
            for one in owner.node.body
            if isinstance(one, ast.AnnAssign)
            and isinstance(one.target, ast.Name)
            and "ClassVar" not in ast.unparse(one.annotation)
            and "init=False" not in ast.unparse(one)
        }

    def _inherited(self, owner: _Class) -> _Parameters | None:
        inherited: _Parameters = {}
        for base in reversed(owner.node.bases):
            plain = base.value if isinstance(base, ast.Subscript) else base
            if _last(plain) not in _EMPTY:
                above = self._meant(owner.module, plain)
                if above is None or (known := self.parameters(above)) is None:
                    return None
                inherited = {**inherited, **known}
        return inherited

    def _passed_on(self, owner: _Class, init: ast.FunctionDef, rest: str) -> _Parameters | None:
        """The parameters that a constructor takes by `**rest`, if it hands them to one other
        constructor and takes none out itself, as by `rest.pop("size")` or `rest["size"]`."""
        code = "\n".join(map(ast.unparse, init.body))
        taken = rf"\b{rest}(\.(pop|get)\(|\[['\"])|['\"] in {rest}\b"
        callees = re.findall(rf"([\w.]+(?:\(\)\.\w+)?)\([^()]*\*\*{rest}\)", code)
        if len(callees) != 1 or re.search(taken, code):
            return None
        if callees[0] == "super().__init__":
            return self._inherited(owner)
        to = self._meant(owner.module, ast.parse(callees[0], mode="eval").body)
        return None if to is None else self.parameters(to)

    def _meant(self, module: str, node: ast.AST) -> _Class | None:
        """The class that a name in a module stands for, or one like `types.Segmenter`."""
        if isinstance(node, ast.Name):
            return self._find(module, node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            for home, name, as_name in self._imports(module):
                if as_name == node.value.id:
                    return self._find(f"{home}.{name}" if name else home, node.attr)
        return None

    def at(self, path: str) -> _Class | None:
        """The class of a full path."""
        module, _, name = path.rpartition(".")
        return self._find(module, name)

    def short(self, name: str) -> _Class | None:
        """The class of a short name; None if there are several."""
        modules = [] if name in _SEVERAL else _short_names().get(name, [])
        return self._find(modules[0], name) if len(modules) == 1 else None

    def _find(self, module: str, name: str, seen: frozenset[str] = frozenset()) -> _Class | None:
        """The class of a name in a module, followed through imports."""
        if module in seen:
            return None
        for one in self._statements(module):
            if isinstance(one, ast.ClassDef) and one.name == name:
                return _Class(module, one)
        for home, inner, as_name in self._imports(module):
            if inner and as_name in (name, "*"):
                wanted = name if inner == "*" else inner
                if (there := self._find(home, wanted, seen | {module})) is not None:
                    return there
        return None

    def _imports(self, module: str) -> Iterator[tuple[str, str, str]]:
        """Each import of a module: from where, the name there (empty for a whole module), and the
        name here."""
        file = self._file(module)
        is_package = file is not None and file.name == "__init__.py"
        package = module if is_package else module.rpartition(".")[0]
        for one in self._statements(module):
            if isinstance(one, ast.Import):
                yield from ((a.name, "", a.asname or a.name) for a in one.names)
            elif isinstance(one, ast.ImportFrom):
                name = "." * one.level + (one.module or "")
                with contextlib.suppress(ImportError):  # a module that lies in no package
                    home = importlib.util.resolve_name(name, package or None)
                    yield from ((home, a.name, a.asname or a.name) for a in one.names)

    def _spec(self, top: str) -> ModuleSpec | None:
        """Where a module or package that is in no other lies."""
        try:
            return importlib.util.find_spec(top) or PathFinder.find_spec(top, [*self._places])
        except (ValueError, ImportError):
            return None

    def _file(self, module: str) -> Path | None:
        top, *below = module.split(".")
        spec = self._spec(top)
        if spec is None or spec.origin is None:
            return None
        file = Path(spec.origin)
        for part in below:
            inside = file.parent / part
            file = inside / "__init__.py" if inside.is_dir() else inside.with_suffix(".py")
        return file if file.suffix == ".py" and file.is_file() else None

    def _read(self, module: str) -> list[ast.stmt]:
        """The classes and imports of a module, those under conditions too. `turnrl` lists its names
        in a file of types beside it."""
        file = self._file(module)
        files = [] if file is None else [file, file.with_suffix(".pyi")]
        try:
            return [one for kept in files if kept.is_file() for one in _parsed(kept.read_bytes())]
        except (OSError, ValueError, SyntaxError):
            return []


def _names_of(file: Path) -> set[str] | None:
    """The names at the top of a module; None if its source leaves a doubt."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, ValueError, SyntaxError):
        return None
    names = set[str]()
    for one in (inner for statement in body for inner in _flat(statement)):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(one.name)
        elif isinstance(one, ast.Import | ast.ImportFrom):
            names |= {(a.asname or a.name).partition(".")[0] for a in one.names}
        elif isinstance(one, ast.Assign | ast.AnnAssign):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            names |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        elif not (isinstance(one, ast.If | ast.Try) or _is_text(one)):
            return None  # a loop, an exec: it may make names
    return None if names & {"*", "__getattr__"} else names


def _is_text(one: ast.stmt) -> bool:
    return isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)


@functools.lru_cache(maxsize=512)  # of a command that reads many recipes
def _parsed(source: bytes) -> Sequence[ast.stmt]:
    """The classes and imports of a source."""
    flat = [one for statement in ast.parse(source).body for one in _flat(statement)]
    return [one for one in flat if isinstance(one, ast.ClassDef | ast.Import | ast.ImportFrom)]


def _flat(statement: ast.stmt) -> Iterator[ast.stmt]:
    yield statement
    if isinstance(statement, ast.If | ast.Try):
        inner = [*statement.body, *statement.orelse]
        if isinstance(statement, ast.Try):
            inner += [*(line for one in statement.handlers for line in one.body)]
            inner += statement.finalbody
        for one in inner:
            yield from _flat(one)


def _last(node: ast.AST) -> str:
    """The last name of `final`, `typing.final` or `contract("...")`."""
    node = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _plain_type(kind: ast.expr) -> object:
    """The type that an annotation spells with `_BUILT_IN` alone; None if it needs other names."""
    try:
        spelt = eval(ast.unparse(kind), _BUILT_IN)
    except Exception:
        return None
    return None if isinstance(spelt, str) else spelt


def _members(kind: ast.expr) -> Iterator[ast.expr]:
    """The types that a value may have: each member of a union, and the type of a list's items."""
    if isinstance(kind, ast.BinOp):
        yield from _members(kind.left)
        yield from _members(kind.right)
    elif isinstance(kind, ast.Subscript) and _last(kind.value) in ("Optional", "Union", "list"):
        inner = kind.slice
        for one in inner.elts if isinstance(inner, ast.Tuple) else [inner]:
            yield from _members(one)
    else:
        yield kind


@functools.cache
def _short_names() -> Mapping[str, list[str]]:
    """The modules that define each class that a recipe may name without its module."""
    tops = {point.module.split(".")[0] for point in importlib.metadata.entry_points(group="turnrl")}
    modules: dict[str, list[str]] = {}
    for top in ("turnrl", *sorted(tops), *_LIBRARIES):
        spec = importlib.util.find_spec(top)
        if spec is None or spec.origin is None:
            continue
        files, root = [Path(spec.origin)], Path(spec.origin).parent
        if files[0].name == "__init__.py":
            folders = [root / folder for folder in _LIBRARIES.get(top, [""])]
            files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
            root = root.parent
        for file in files:
            module = ".".join(file.relative_to(root).with_suffix("").parts)
            text = file.read_text(encoding="utf-8", errors="replace")
            for name in re.findall(r"^class (\w+)", text, re.MULTILINE):
                modules.setdefault(name, []).append(module.removesuffix(".__init__"))
    return modules
