"""Differentially private training of Llamas on long private documents, on TorchTitan."""
