"""Checks of this machine: each part of a private step against a plain reference."""

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU
