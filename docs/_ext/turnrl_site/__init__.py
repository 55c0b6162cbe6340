"""Sphinx extension that writes turnrl's reference from the program itself.

A component, an option, a metric, a recipe or a public name without a description fails the build.
"""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from turnrl_site import directives


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
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
    app.connect("env-get-outdated", outdated)
    app.connect("autodoc-process-docstring", directives.docstring_lines, priority=400)
    return {"parallel_read_safe": True}


def outdated(app: Sphinx, env: BuildEnvironment, *changes: set[str]) -> list[str]:
    """The pages of the reference, which change with the program and not with their own text."""
    return [page for page in env.found_docs if page.startswith("reference/")]
