"""Differentially private training of Llamas on long private documents, on TorchTitan."""

from torchtitan_dp.process import require_environment

require_environment()  # before any command and any import of PyTorch
