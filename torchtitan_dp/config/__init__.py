"""The configuration of a run: the sections that this project adds (`schema`), read and checked.

`load` reads a TOML and the command line, by the `keys` of the schema, and keeps a run's
configuration in its folder; `supported` and `checks` refuse settings; `derived` are facts that
follow from them. TorchTitan's `job.custom_config_module = "torchtitan_dp.config"` is `JobConfig`.
"""

from torchtitan_dp.config.schema import Data, JobConfig, Privacy

__all__ = ["Data", "JobConfig", "Privacy"]
