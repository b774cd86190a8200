"""The models that can be trained privately, and their per-sample losses."""

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU
