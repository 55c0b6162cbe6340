"""Directives that show the program's own facts: the pages of the reference name them, and hold no
copy of their own."""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from turnrl_site import facts

_LONG = 120
"""Lines of a help page beyond which it is folded."""


class Generated(SphinxDirective, ABC):
    """A directive whose content is reStructuredText that `text` makes."""

    optional_arguments = 2

    @abstractmethod
    def text(self) -> Iterable[str]:
        """The lines."""

    def run(self) -> list[nodes.Node]:
        """Parse them, sections included."""
        return self.parse_text_to_nodes("\n".join(self.text()), allow_section_headings=True)


class Components(Generated):
    """The classes of a hook, first a line for each, then each with its arguments:
    `.. components:: turnrl_tools`."""

    def text(self) -> Iterable[str]:
        (hook,) = self.arguments
        if hook not in facts.hooks():
            raise ExtensionError(f"{self.env.docname} shows {hook}, which brings no classes")
        components = sorted(facts.hooks()[hook].items())
        rows = [(f"{name}_", facts.first_sentence(facts.prose(cls))) for name, cls in components]
        yield from table(("name", "meaning"), rows, "names")
        for name, cls in components:
            yield from heading(name, "-")
            yield from origin(cls)
            yield from [*from_docstring(facts.prose(cls).splitlines()), ""]
            yield from argument_table(facts.arguments(cls))


class Options(Generated):
    """The options of a section of a recipe: `.. options:: model.policy`."""

    def text(self) -> Iterable[str]:
        (section,) = self.arguments
        yield from argument_table(facts.arguments(facts.SECTIONS[section]), f"{section}.")


class PublicNames(Generated):
    """The public names of a module of one kind, as a table and then in full:
    `.. public-names:: turnrl class`."""

    def text(self) -> Iterable[str]:
        module = importlib.import_module(self.arguments[0])
        kinds = self.arguments[1].split(",")
        shown = [name for name in facts.names(module) if name.kind in kinds]
        role = {"class": "class", "error": "exc", "function": "func", "value": "data"}
        rows = [(f":{role[n.kind]}:`~{module.__name__}.{n.name}`", n.text) for n in shown]
        yield from table(("name", "meaning"), rows, "names")
        for name in shown:
            path = f"{module.__name__}.{name.name}"
            if name.kind == "value":
                value = getattr(module, name.name)
                yield f".. py:data:: {path}"
                if type(value).__module__ in ("types", "typing"):  # another name of a type
                    yield f"   :value: {facts.type_text(value)}"
                yield from ["", *indented(facts.value_doc(name.name, value).splitlines()), ""]
            else:
                yield f".. auto{'function' if name.kind == 'function' else 'class'}:: {path}"
                yield from ["" if name.kind == "function" else "   :members:", ""]


class Commands(Generated):
    """The help of every command."""

    def text(self) -> Iterable[str]:
        for command in [(), *facts.commands()]:
            yield from heading(" ".join(("turnrl", *command)), "-")
            shown = facts.help_of(*command)
            block = [".. code-block:: text", "", *indented(shown.splitlines()), ""]
            if shown.count("\n") > _LONG:
                summary = f"All {shown.count(chr(10)) + 1} lines"
                yield from html(f"<details><summary>{summary}</summary>")
                yield from block
                yield from html("</details>")
            else:
                yield from block


class Recipes(Generated):
    """Every bundled recipe: its comment, its command and its text."""

    def text(self) -> Iterable[str]:
        for recipe in facts.recipes():
            yield from heading(recipe.name, "-")
            if not recipe.comment:
                raise ExtensionError(f"recipe {recipe.name} has no comment. Begin it with one.")
            yield from [recipe.comment, ""]
            yield from [".. code-block:: yaml", "", *indented(recipe.text.splitlines()), ""]


class Metrics(Generated):
    """Every column of `metrics.csv`, with its unit and its meaning."""

    def text(self) -> Iterable[str]:
        for title, text, group in facts.metrics():
            yield from heading(title, "-")
            yield from [text, ""]
            rows = [
                (f"``{m.name}``", m.unit, f"{m.text} *{m.when}*" if m.text and m.when else m.text)
                for m in group
            ]
            yield from table(("column", "unit", "meaning"), rows, "options metrics")


# ---------------------------------------------------------------- reStructuredText


def heading(title: str, line: str) -> list[str]:
    """A title with its line."""
    return [title, line * len(title), ""]


def indented(lines: Iterable[str]) -> list[str]:
    """The lines as the content of a directive."""
    return [f"   {line}".rstrip() for line in lines]


def html(text: str) -> list[str]:
    """HTML as it stands."""
    return [".. raw:: html", "", f"   {text}", ""]


def origin(cls: type) -> list[str]:
    """How a recipe names a class, and the package that brings it."""
    package = cls.__module__.partition(".")[0].replace("_", "-")
    return [f"``class_path: {cls.__name__}``, of the package ``{package}``.", ""]


def argument_table(arguments: Sequence[facts.Argument], prefix: str = "") -> list[str]:
    """The arguments of a class; a sentence if it takes none."""
    if not arguments:
        return ["It takes no arguments.", ""]
    rows = [
        (f"``{prefix}{a.name}``", f"``{a.type}``", f"``{a.default or chr(39) * 2}``", a.text)
        for a in arguments
    ]
    return table(("argument" if not prefix else "option", "type", "default", "meaning"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "options") -> list[str]:
    """A table whose cells are reStructuredText of one line. A narrow screen stacks its cells.

    Raises:
        ExtensionError: If a cell is empty.
    """
    lines = [".. list-table::", f"   :class: {kind}", "   :header-rows: 1", ""]
    for row in [head, *rows]:
        for title, cell in zip(head, row, strict=True):
            if not cell.strip():
                raise ExtensionError(
                    f"{row[0]} has no {title}. Write it in its docstring, or in metrics.yaml."
                )
        lines += [f"   {'  ' if n else '* '}- {bars(literals(cell))}" for n, cell in enumerate(row)]
    return [*lines, ""]


def from_docstring(lines: Sequence[str]) -> list[str]:
    """A docstring's lines as reStructuredText: bars are bars, and indented paragraphs are literal
    blocks. The sections of a docstring (`Args:`) keep their indentation."""
    found: list[str] = []
    section = literal = False
    for before, line in zip(["", *lines], lines, strict=False):
        if line and not line.startswith(" "):
            section = re.match(r"[A-Z]\w+:$", line) is not None
            literal = False
        elif line.startswith("    ") and not (before.strip() or section or literal):
            found += ["::", ""]
            literal = True
        found.append(line if literal else bars(line))
    return found


def literals(line: str) -> str:
    """The line with `code` as a literal, in which a backslash is one; roles stay as they are."""
    return re.sub(r"(?<![:`])`([^`]+)`(?!`)", r"``\1``", line)


def bars(line: str) -> str:
    """The line with bars that are no markup, outside of code."""
    return re.sub(r"(`+[^`]*`+)|\|", lambda part: part[1] or r"\|", line)


def docstring_lines(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Sphinx's event before a docstring is read as reStructuredText."""
    lines[:] = from_docstring(lines)
