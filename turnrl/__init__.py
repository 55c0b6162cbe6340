"""turnrl: train language-model agents that use tools over several turns,
with credit given turn by turn.

`__init__.pyi` lists the public interface. Each name is imported from its module when it is first
used, so that `import turnrl` stays fast.
"""

import ast
import importlib.metadata
from pathlib import Path
from typing import Any

import turnrl.types  # noqa: F401 - a contract names its hook, and plugins are asked for all hooks

_LISTED = ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8"))
_HOMES = {
    alias.name: node.module or ""
    for node in _LISTED.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
_MOVED = dict.fromkeys(("Choice", "Compared", "Math", "Number"), "turnrl_answers")
"""Public before 0.8, and named by recipes that runs have saved. Modules that had some of these, or
of the names above, in those days take `__getattr__` from here."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("turnrl")
    if (home := _HOMES.get(name) or _MOVED.get(name)) is None:
        raise AttributeError(f"module 'turnrl' has no attribute {name!r}")
    try:
        return getattr(__import__(home, fromlist=[name]), name)  # a name, or a module in a package
    except ModuleNotFoundError as error:
        if error.name != home.partition(".")[0]:
            raise
        from turnrl.errors import PluginError

        package = error.name.replace("_", "-")
        lacks = f"turnrl.{name} is of {package}, which is not installed"
        raise PluginError(f"{lacks}. Run 'pip install {package}'.") from error


def __dir__() -> list[str]:
    return __all__
