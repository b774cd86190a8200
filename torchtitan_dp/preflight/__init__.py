"""The checks of a run before its first step: of its configuration and data, and a rehearsal."""

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU
