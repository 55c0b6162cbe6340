"""turnrl: train language-model agents that use tools over several turns,
with credit given turn by turn.

`__init__.pyi` lists the public interface. Each name is imported from its module on first use.
"""

import lazy_loader

__version__ = "0.20.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
