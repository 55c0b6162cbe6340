"""Sphinx extension that writes turnrl's reference from the program itself.

A component, an option, a metric, a command, a recipe or a public name without a description fails
the build, by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

from turnrl_site import directives, facts


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives and what is checked before a page is read."""
    kinds = {
        "components": directives.Components,
        "options": directives.Options,
        "public-names": directives.PublicNames,
        "commands": directives.Commands,
        "recipes": directives.Recipes,
        "metrics": directives.Metrics,
    }
    for name, kind in kinds.items():
        app.add_directive(name, kind)
    app.connect("builder-inited", check)
    app.connect("env-get-outdated", outdated)
    app.connect("autodoc-process-docstring", directives.docstring_lines, priority=400)
    return {"parallel_read_safe": True}


def outdated(app: Sphinx, env: BuildEnvironment, *changes: set[str]) -> list[str]:
    """The pages of the reference, which change with the program and not with their own text."""
    return [page for page in env.found_docs if page.startswith("reference/")]


def check(app: Sphinx) -> None:
    """Refuse to build a reference with gaps.

    Raises:
        ExtensionError: Naming everything that has no description, or a hook that no page shows.
    """
    if missing := facts.gaps():
        raise ExtensionError(f"no description: {', '.join(missing)}. Write them.")
    pages = [page.read_text("utf-8") for page in Path(app.srcdir, "reference").rglob("*.rst")]
    if unseen := sorted(set(facts.hooks()) - directives.shown_hooks(pages)):
        raise ExtensionError(
            f"no page shows the components of {', '.join(unseen)}. Add '.. components:: HOOK' to "
            "docs/reference."
        )
