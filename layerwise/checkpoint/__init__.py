"""Checkpoints of a parallel module and its optimizer, which any plan on any number of ranks can go on from."""

from layerwise.checkpoint.save_and_load import Writing, begin_saving, load, model_digest, resume, save
from layerwise.checkpoint.signals import STOPPED, SaveSignals
from layerwise.checkpoint.step_folders import latest

__all__ = ["STOPPED", "SaveSignals", "Writing", "begin_saving", "latest", "load", "model_digest", "resume", "save"]
