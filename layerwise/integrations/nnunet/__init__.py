"""nnU-Net: its trainer over all ranks, and `predict` of what it has trained."""

from layerwise.integrations.nnunet.prediction import predict as predict
