"""This module shows nnU-Net the trainer: it imports every module of a folder by its bare name."""

from layerwise.integrations.nnunet.trainer import nnUNetTrainerLayerwise as nnUNetTrainerLayerwise
