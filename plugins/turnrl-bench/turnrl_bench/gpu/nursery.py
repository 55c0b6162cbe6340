"""Imported once, by the process that forks the runs of `training`: what every run needs. Nothing
here touches a GPU."""

import datasets as datasets
import jsonargparse as jsonargparse
import peft as peft
from transformers import Qwen2ForCausalLM as Qwen2ForCausalLM

from turnrl import load as load
from turnrl_bench.gpu import scripted as scripted
