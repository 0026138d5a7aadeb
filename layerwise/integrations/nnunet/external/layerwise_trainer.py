"""Where nnU-Net looks for the trainer: it imports every module of this folder by its bare name."""

from layerwise.integrations.nnunet.trainer import nnUNetTrainerLayerwise as nnUNetTrainerLayerwise
