"""The source code of the classes that recipes name, read without importing any of it.

None stands for doubt: a class that changes the settings it passes on, a name that two classes have,
a module whose names come from a loop.
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

_LIBRARIES = {"torch": ["optim"], "lightning": ["pytorch/callbacks", "pytorch/loggers"]}
"""Folders of other libraries whose classes a recipe may name without their module."""
_SEVERAL = ("Adafactor",)
"""Names of classes that two libraries have."""
_EMPTY = ("ABC", "object", "Generic", "Protocol")
"""Bases whose instances are made without arguments."""
_PLAIN = ("final", "dataclass", "contract")
"""Decorators that leave a class's arguments as its source writes them."""


@dataclass(frozen=True)
class Class:
    """A class in source code."""

    module: str
    node: ast.ClassDef

    @property
    def decorators(self) -> set[str]:
        """Names of its decorators."""
        return {last_name(one) for one in self.node.decorator_list}


Parameters = dict[str, ast.expr | None]
"""Parameters by name, with their types as the source writes them."""


class Source:
    """Source code of the classes that recipes name.

    Args:
        places: Folders with modules that are not installed.
    Attributes:
        places: The same folders.
    """

    def __init__(self, places: Sequence[str]) -> None:
        self.places = places
        self._statements = functools.cache(self._read)

    def extends(self, owner: Class, contracts: Sequence[Class]) -> bool | None:
        """True if a class extends one of the others, at any depth; None if its source leaves a
        doubt."""
        if owner in contracts:
            return True
        bases = [one.value if isinstance(one, ast.Subscript) else one for one in owner.node.bases]
        found = [self.meant(owner.module, one) for one in bases if last_name(one) not in _EMPTY]
        known = [None if one is None else self.extends(one, contracts) for one in found]
        return True if True in known else None if None in known else False

    def parameters(self, owner: Class) -> Parameters | None:
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

    def _inherited(self, owner: Class) -> Parameters | None:
        inherited: Parameters = {}
        for base in reversed(owner.node.bases):
            plain = base.value if isinstance(base, ast.Subscript) else base
            if last_name(plain) not in _EMPTY:
                above = self.meant(owner.module, plain)
                if above is None or (known := self.parameters(above)) is None:
                    return None
                inherited = {**inherited, **known}
        return inherited

    def _passed_on(self, owner: Class, init: ast.FunctionDef, rest: str) -> Parameters | None:
        """The parameters that a constructor takes by `**rest`, if it hands them to one other
        constructor and takes none out itself, as by `rest.pop("size")` or `rest["size"]`."""
        code = "\n".join(map(ast.unparse, init.body))
        taken = rf"\b{rest}(\.(pop|get)\(|\[['\"])|['\"] in {rest}\b"
        callees = re.findall(rf"([\w.]+(?:\(\)\.\w+)?)\([^()]*\*\*{rest}\)", code)
        if len(callees) != 1 or re.search(taken, code):
            return None
        if callees[0] == "super().__init__":
            return self._inherited(owner)
        to = self.meant(owner.module, ast.parse(callees[0], mode="eval").body)
        return None if to is None else self.parameters(to)

    def meant(self, module: str, node: ast.AST) -> Class | None:
        """The class that a name in a module stands for, or one like `types.Segmenter`."""
        if isinstance(node, ast.Name):
            return self._find(module, node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            for home, name, as_name in self._imports(module):
                if as_name == node.value.id:
                    return self._find(f"{home}.{name}" if name else home, node.attr)
        return None

    def at(self, path: str) -> Class | None:
        """The class of a full path."""
        module, _, name = path.rpartition(".")
        return self._find(module, name)

    def short(self, name: str) -> Class | None:
        """The class of a short name; None if there are several."""
        modules = [] if name in _SEVERAL else _short_names().get(name, [])
        return self._find(modules[0], name) if len(modules) == 1 else None

    def _find(self, module: str, name: str, seen: frozenset[str] = frozenset()) -> Class | None:
        """The class of a name in a module, followed through imports."""
        if module in seen:
            return None
        for one in self._statements(module):
            if isinstance(one, ast.ClassDef) and one.name == name:
                return Class(module, one)
        for home, inner, as_name in self._imports(module):
            if inner and as_name in (name, "*"):
                wanted = name if inner == "*" else inner
                if (there := self._find(home, wanted, seen | {module})) is not None:
                    return there
        return None

    def _imports(self, module: str) -> Iterator[tuple[str, str, str]]:
        """Each import of a module: from where, the name there (empty for a whole module), and the
        name here."""
        file = self.file(module)
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

    def spec(self, top: str) -> ModuleSpec | None:
        """Where a module or package that is in no other lies."""
        try:
            return importlib.util.find_spec(top) or PathFinder.find_spec(top, [*self.places])
        except (ValueError, ImportError):
            return None

    def file(self, module: str) -> Path | None:
        """The file of a module; None if it is not there, or not written in Python."""
        top, *below = module.split(".")
        spec = self.spec(top)
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
        file = self.file(module)
        files = [] if file is None else [file, file.with_suffix(".pyi")]
        try:
            return [one for kept in files if kept.is_file() for one in _parsed(kept.read_bytes())]
        except (OSError, ValueError, SyntaxError):
            return []


def names_of(file: Path) -> set[str] | None:
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


def last_name(node: ast.AST) -> str:
    """The last name of `final`, `typing.final` or `contract("...")`."""
    node = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def members_of(kind: ast.expr) -> Iterator[ast.expr]:
    """The types that a value may have: each member of a union, and the type of a list's items."""
    if isinstance(kind, ast.BinOp):
        yield from members_of(kind.left)
        yield from members_of(kind.right)
    elif isinstance(kind, ast.Subscript) and last_name(kind.value) in ("Optional", "Union", "list"):
        inner = kind.slice
        for one in inner.elts if isinstance(inner, ast.Tuple) else [inner]:
            yield from members_of(one)
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
