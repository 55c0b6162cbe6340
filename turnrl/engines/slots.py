import sys

import turnrl_slots.engine

sys.modules[__name__] = turnrl_slots.engine
