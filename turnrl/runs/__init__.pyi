from . import record as record
from .find import find_run as find_run
