"""The Hugging Face hub of models and data sets, and a check that it answers."""

import functools
import logging
import sys

_logger = logging.getLogger(__name__)


@functools.cache
def check_hub() -> None:
    """Check once, before anything is requested from the Hugging Face hub, that it answers in 5 s.

    If not, `transformers` and `datasets` use only cached files. Otherwise they would retry every
    file for half a minute. `HF_HUB_OFFLINE` has the same effect, without this check.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception as error:  # whatever its transport raises
        message = "the hub (%s) is out of reach (%s): only cached files are used"
        _logger.warning(message, constants.ENDPOINT, str(error) or type(error).__name__)
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # it has read the constant already
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
