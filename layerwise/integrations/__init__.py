"""Integrations with the tools that people train and predict with; each needs its package.

A file or folder a tool: Lightning, Accelerate, Hugging Face's Trainer, MONAI, nnU-Net. They know `api`, `run`,
`inference` and `volumes`; nothing imports them but the user.
"""
