"""Checkpoints of a parallel model and its optimizer, from which any plan can resume on any number of ranks.

`save_and_load` writes and reads them, `shards` handles the ranks' files, `reader` reads a checkpoint, `step_folders`
finds the latest, `signals` handles SIGUSR1 and SIGTERM. The room knows `run`; `train` and `api` know it.
"""

from layerwise.checkpoint.save_and_load import load, model_digest, resume, save
from layerwise.checkpoint.signals import STOPPED, SaveSignals
from layerwise.checkpoint.step_folders import latest

__all__ = ["STOPPED", "SaveSignals", "latest", "load", "model_digest", "resume", "save"]
