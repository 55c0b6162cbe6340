"""`SGLang`: the engine that samples with SGLang servers.

settings  SGLang, the settings; the engine itself is `turnrl_servers.ServerEngine`
server    how SGLang's server is asked
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnrl import hookimpl
from turnrl.plugin.hooks import make_lazy

if TYPE_CHECKING:
    from turnrl_sglang.settings import SGLang as SGLang

__getattr__, __all__ = make_lazy(__name__, __file__)


@hookimpl
def turnrl_engines() -> list[str]:
    """The engine of this package."""
    return ["turnrl_sglang.settings:SGLang"]
