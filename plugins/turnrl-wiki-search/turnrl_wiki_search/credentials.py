"""Secrets of search servers: named in recipes, read when an index is opened, and never shown."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

from turnrl import RecipeError
from turnrl.plugin.patience import strike

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SECRET_WORD = re.compile(
    r"(key|token|secret|password|passwd|passphrase|pwd|auth|authorization|sig|signature|jwt|bearer"
    r"|credentials?)$"
)


def is_secret_name(parameter: str) -> bool:
    """True if a parameter of an address holds a secret, by a word in its name."""
    words = re.split(r"[^a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", parameter).lower())
    return any(map(_SECRET_WORD.search, words))


def check_reference(setting: str, value: str | None) -> None:
    """Raise if a secret is written out in a recipe.

    Raises:
        RecipeError: Without the value.
    """
    if value is not None and not _REFERENCE.fullmatch(value):
        raise RecipeError(
            f"{setting} must name an environment variable, as '${{NAME}}'. Its value is not shown, "
            "because it may be the secret itself. Recipes are saved with every run."
        )


def read_secret(reference: str | None, default: str) -> tuple[str | None, str]:
    """A secret, and the environment variable that holds it.

    Args:
        reference: `${NAME}`, or None.
        default: The variable that is read without a reference.
    Raises:
        RecipeError: If the reference names a variable that is not set.
    """
    if reference is not None:
        return fill_in(reference)[0], reference[2:-1]
    return os.environ.get(default) or None, default


def fill_in(text: str) -> tuple[str, list[str]]:
    """A text with the values of the environment variables that it names, and these values.

    Raises:
        RecipeError: If a variable is not set.
    """
    secrets: list[str] = []
    alone = _REFERENCE.fullmatch(text)

    def value(reference: re.Match[str]) -> str:
        secret = os.environ.get(reference[1])
        if not secret:
            raise RecipeError(
                f"{text} names the environment variable {reference[1]}, which is not set. Set it."
            )
        secrets.extend({secret, quote(secret, safe=""), quote_plus(secret)})
        return secret if alone else quote(secret, safe="")

    return _REFERENCE.sub(value, text), secrets


def trusted_certificates(setting: str | None, variable: str, https: bool) -> str | None:
    """The file with the certificates to trust; None for the machine's own.

    Args:
        setting: The file that the recipe names.
        variable: The environment variable that names it otherwise.
        https: True if the server's address is https.
    Raises:
        RecipeError: If there is no such file, or the setting would have no effect.
    """
    file = setting or os.environ.get(variable)
    if file and not os.path.isfile(file):  # noqa: PTH113
        raise RecipeError(f"no file {file!r} with certificates to trust. Correct ca_certs.")
    if setting and not https:
        raise RecipeError(f"ca_certs is {setting!r}, but the server's address is not https.")
    return file if file and https else None


_struck_out: set[str] = set()
"""The secrets of every connection of this process."""


def hide_from_logs(secrets: Iterable[str], loggers: Iterable[str]) -> None:
    """Strike secrets out of all later lines of these loggers."""
    _struck_out.update(secrets)
    for name in loggers:
        logging.getLogger(name).addFilter(_strike_line)


def _strike_line(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    struck = strike(message, _struck_out)
    if struck != message or record.exc_info:
        record.msg, record.args, record.exc_info, record.exc_text = struck, (), None, None
    return True
