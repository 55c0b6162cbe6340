"""`SGLang`: the engine that samples with SGLang servers.

engine  SGLang; what it shares with other engines behind servers is `turnrl_servers`
server  how SGLang's server is asked
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from turnrl import Engine, hookimpl, lazy_names

if TYPE_CHECKING:
    from turnrl_sglang.engine import SGLang as SGLang

__getattr__, __all__ = lazy_names(__name__, __file__)


@hookimpl
def turnrl_engines() -> Iterable[type[Engine]]:
    """The engine of this package."""
    from turnrl_sglang.engine import SGLang

    return [SGLang]
