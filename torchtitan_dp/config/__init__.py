"""The configuration of a run: the sections that this project adds (`schema`), read and checked.

`load` reads a TOML and the command line, and keeps a run's configuration in its folder; `checks`,
`combinations` and `supported` refuse settings; `derived` are facts that follow from them.
TorchTitan's `job.custom_config_module = "torchtitan_dp.config"` finds `JobConfig` here.
"""

from torchtitan_dp.config.schema import Data, JobConfig, Privacy

__all__ = ["Data", "JobConfig", "Privacy"]
