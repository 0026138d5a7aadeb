"""Prints the folder that nnU-Net's environment variable nnUNet_extTrainer takes."""

from pathlib import Path

if __name__ == "__main__":
    print(Path(__file__).parent / "external")
