"""What ranks do together below any model; and TorchTitan without a GPU, imported quickly.

Modules that use TorchTitan import this package first: `import torchtitan` fails without it on a
machine that has no accelerator.
"""

from torchtitan_dp.distributed import cpu

with cpu.left_out():
    cpu.install()
    import torchtitan.hf_datasets.text_datasets
    import torchtitan.models.attention  # noqa: F401
