"""Reads the source code of the classes that recipes name, without importing it.

A result of None means doubt: a class changes the settings that it passes on, two classes have the
name, or a module makes names in a loop.
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
_AMBIGUOUS = ("Adafactor",)
"""Names of classes that two libraries have."""
_EMPTY = ("ABC", "object", "Generic", "Protocol")
"""Bases whose constructors take no arguments."""
_PLAIN = ("final", "dataclass", "contract")
"""Decorators that leave a class's arguments as its source writes them."""


@dataclass(frozen=True)
class Class:
    """A class in source code."""

    module: str
    node: ast.ClassDef

    @property
    def decorators(self) -> set[str]:
        """The names of the class's decorators."""
        return {last_name(decorator) for decorator in self.node.decorator_list}


Parameters = dict[str, ast.expr | None]
"""Parameters by name, with their types as the source writes them."""


class Source:
    """Source code of the classes that recipes name.

    Args:
        folders: Folders with modules that are not installed.
    Attributes:
        folders: The same folders.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = folders
        self._statements = functools.cache(self._read)

    def extends(self, owner: Class, contracts: Sequence[Class]) -> bool | None:
        """True if a class extends one of the others, at any depth; None if its source leaves a
        doubt."""
        if owner in contracts:
            return True
        bases = [
            base.value if isinstance(base, ast.Subscript) else base for base in owner.node.bases
        ]
        classes = [
            self.meant(owner.module, base) for base in bases if last_name(base) not in _EMPTY
        ]
        answers = [None if base is None else self.extends(base, contracts) for base in classes]
        return True if True in answers else None if None in answers else False

    def parameters(self, owner: Class) -> Parameters | None:
        """The parameters of a class's constructor; None if its source leaves a doubt."""
        body = owner.node.body
        methods = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        if owner.decorators - {*_PLAIN} or "__new__" in methods:
            return None
        if init := methods.get("__init__"):
            args = init.args
            named = [*args.posonlyargs, *args.args][1:] + args.kwonlyargs
            passed = self._passed_on(owner, init, args.kwarg.arg) if args.kwarg else {}
            return None if passed is None else {arg.arg: arg.annotation for arg in named} | passed
        inherited = self._inherited(owner)
        if inherited is None or "dataclass" not in owner.decorators:
            return inherited
        return inherited | {
            field.target.id: field.annotation
            for field in body
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and "ClassVar" not in ast.unparse(field.annotation)
            and "init=False" not in ast.unparse(field)
        }

    def _inherited(self, owner: Class) -> Parameters | None:
        inherited: Parameters = {}
        for base in reversed(owner.node.bases):
            plain = base.value if isinstance(base, ast.Subscript) else base
            if last_name(plain) not in _EMPTY:
                above = self.meant(owner.module, plain)
                if above is None or (parameters := self.parameters(above)) is None:
                    return None
                inherited = {**inherited, **parameters}
        return inherited

    def _passed_on(self, owner: Class, init: ast.FunctionDef, rest: str) -> Parameters | None:
        """The parameters that a constructor takes by `**rest`; None if in doubt. It has to pass
        them to one other constructor, and must not take any out itself, as by `rest.pop("size")` or
        `rest["size"]`."""
        code = "\n".join(map(ast.unparse, init.body))
        taken = rf"\b{rest}(\.(pop|get)\(|\[['\"])|['\"] in {rest}\b"
        callees = re.findall(rf"([\w.]+(?:\(\)\.\w+)?)\([^()]*\*\*{rest}\)", code)
        if len(callees) != 1 or re.search(taken, code):
            return None
        if callees[0] == "super().__init__":
            return self._inherited(owner)
        callee = self.meant(owner.module, ast.parse(callees[0], mode="eval").body)
        return None if callee is None else self.parameters(callee)

    def meant(self, module: str, node: ast.AST) -> Class | None:
        """The class that a name in a module means, such as `Segmenter` or `types.Segmenter`."""
        if isinstance(node, ast.Name):
            return self._find(module, node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            for home, name, as_name in self._imports(module):
                if as_name == node.value.id:
                    return self._find(f"{home}.{name}" if name else home, node.attr)
        return None

    def at(self, path: str) -> Class | None:
        """The class with this full path."""
        module, _, name = path.rpartition(".")
        return self._find(module, name)

    def short(self, name: str) -> Class | None:
        """The class with this short name; None if there are several."""
        modules = [] if name in _AMBIGUOUS else _short_names().get(name, [])
        return self._find(modules[0], name) if len(modules) == 1 else None

    def _find(self, module: str, name: str, seen: frozenset[str] = frozenset()) -> Class | None:
        """The class that a name in a module means, followed through imports."""
        if module in seen:
            return None
        for statement in self._statements(module):
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                return Class(module, statement)
        for home, inner, as_name in self._imports(module):
            if inner and as_name in (name, "*"):
                wanted = name if inner == "*" else inner
                if (imported := self._find(home, wanted, seen | {module})) is not None:
                    return imported
        return None

    def _imports(self, module: str) -> Iterator[tuple[str, str, str]]:
        """Each import of a module: the other module, the name there (empty for a whole module), and
        the name here."""
        file = self.file(module)
        is_package = file is not None and file.name == "__init__.py"
        package = module if is_package else module.rpartition(".")[0]
        for statement in self._statements(module):
            if isinstance(statement, ast.Import):
                yield from ((a.name, "", a.asname or a.name) for a in statement.names)
            elif isinstance(statement, ast.ImportFrom):
                name = "." * statement.level + (statement.module or "")
                with contextlib.suppress(ImportError):  # a relative import outside any package
                    home = importlib.util.resolve_name(name, package or None)
                    yield from ((home, a.name, a.asname or a.name) for a in statement.names)

    def spec(self, top: str) -> ModuleSpec | None:
        """The spec of a top-level module or package; None if there is none."""
        try:
            return importlib.util.find_spec(top) or PathFinder.find_spec(top, [*self.folders])
        except (ValueError, ImportError):
            return None

    def file(self, module: str) -> Path | None:
        """The file of a module; None if it is missing, or not written in Python."""
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
        """The classes and imports of a module, including those under conditions. A `.pyi` file
        beside it is read too: `turnrl` lists its names there."""
        file = self.file(module)
        files = [] if file is None else [file, file.with_suffix(".pyi")]
        try:
            sources = [path.read_bytes() for path in files if path.is_file()]
            return [statement for source in sources for statement in _parsed(source)]
        except (OSError, ValueError, SyntaxError):
            return []


def names_of(file: Path) -> set[str] | None:
    """The names at the top of a module; None if its source leaves a doubt."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, ValueError, SyntaxError):
        return None
    names = set[str]()
    for statement in (inner for outer in body for inner in _flat(outer)):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {(a.asname or a.name).partition(".")[0] for a in statement.names}
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = (
                [statement.target] if isinstance(statement, ast.AnnAssign) else statement.targets
            )
            names |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        elif not (isinstance(statement, ast.If | ast.Try) or _is_text(statement)):
            return None  # a loop or an exec, for example, may make names
    return None if names & {"*", "__getattr__"} else names


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@functools.lru_cache(maxsize=512)  # for commands that read many recipes
def _parsed(source: bytes) -> Sequence[ast.stmt]:
    """The classes and imports of a source."""
    flat = [inner for statement in ast.parse(source).body for inner in _flat(statement)]
    kinds = (ast.ClassDef, ast.Import, ast.ImportFrom)
    return [statement for statement in flat if isinstance(statement, kinds)]


def _flat(statement: ast.stmt) -> Iterator[ast.stmt]:
    """A statement, and those inside it if it is an `if` or a `try`, at any depth."""
    yield statement
    if isinstance(statement, ast.If | ast.Try):
        inner = [*statement.body, *statement.orelse]
        if isinstance(statement, ast.Try):
            inner += [*(line for handler in statement.handlers for line in handler.body)]
            inner += statement.finalbody
        for line in inner:
            yield from _flat(line)


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
        for member in inner.elts if isinstance(inner, ast.Tuple) else [inner]:
            yield from members_of(member)
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
