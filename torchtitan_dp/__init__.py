"""Differentially private training of language models on long private documents, on TorchTitan."""

from torchtitan_dp.process import require_environment

require_environment()  # before any command and any import of PyTorch
