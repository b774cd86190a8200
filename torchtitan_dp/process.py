"""The lock of a run's folder, under the name by which tools outside of the package import it."""

from torchtitan_dp.base.process import lock_folder

__all__ = ["lock_folder"]
