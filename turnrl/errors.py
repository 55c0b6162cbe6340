"""What can go wrong, by whose hand.

The policy's own mistakes (bad JSON, an unknown tool, no answer) are data and never an exception:
see `ToolResult.ok` and `Reading.format_error`. Everything here is a mistake of the recipe, of a
package, or of the world. A message names the thing, the value and the next step; the command line
prints the message alone, without a traceback, and exits with `exit_code`.
"""


class TurnRLError(Exception):
    """Base of every error that turnrl raises on purpose."""

    exit_code = 1


class RecipeError(TurnRLError, ValueError):
    """The recipe, or an argument given from Python, asks for something that cannot be."""

    exit_code = 2


class PluginError(TurnRLError, ImportError):
    """An installed plugin cannot be imported, or breaks its contract."""

    exit_code = 2


class DataError(TurnRLError, ValueError):
    """A data set or corpus is missing, empty, or lacks a field."""

    exit_code = 2


class CheckpointError(TurnRLError, ValueError):
    """A checkpoint does not belong to the policy that it is loaded into."""

    exit_code = 2


class ToolError(TurnRLError, RuntimeError):
    """A tool's world is broken: a server is down, an index is missing, a call hangs.

    It stops the run with the last good checkpoint. It is never shown to the policy, so nothing that
    an outage produced is rewarded or trained on.
    """


class TrainingError(TurnRLError, ArithmeticError):
    """Learning has broken down: a loss or gradient that is not finite."""
