"""Checkpoints of a parallel module and its optimizer, which any plan on any number of ranks can go on from.

`save_and_load` writes and reads them, `shards` has the files of ranks, `reader` what is read, `step_folders` which is
the latest, `signals` what SIGUSR1 and SIGTERM ask for. It knows `run`; `train` and `api` know it.
"""

from layerwise.checkpoint.save_and_load import Writing, begin_saving, load, model_digest, resume, save
from layerwise.checkpoint.signals import STOPPED, SaveSignals
from layerwise.checkpoint.step_folders import latest

__all__ = ["STOPPED", "SaveSignals", "Writing", "begin_saving", "latest", "load", "model_digest", "resume", "save"]
