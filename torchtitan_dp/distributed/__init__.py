"""What ranks do together below any model, and TorchTitan imported quickly and without a GPU.

Importing this package lets `import torchtitan` succeed on a machine without an accelerator, so
modules that use TorchTitan import it first.
"""

from torchtitan_dp.distributed import cpu, deferred

with deferred.until_called():
    cpu.install()
    import torchtitan.hf_datasets.text_datasets
    import torchtitan.models.attention  # noqa: F401
