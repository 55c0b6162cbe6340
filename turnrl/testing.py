"""The checks of a plugin's contract, and the engine that plays scripted texts: `turnrl_testing` by
the name under which a plugin's tests find them."""

from turnrl_testing import *  # noqa: F403
from turnrl_testing import __all__ as __all__
