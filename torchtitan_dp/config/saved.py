"""A run's configuration, kept in its folder for later tools.

It has the paths of private data: readable by its owner only, and never released.
"""

import dataclasses
import json
import os

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import config_from_values
from torchtitan_dp.process import write_atomically

RUN_CONFIG_FILE = "run_config.json"
_ONE_PROCESS = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
)


def write_config(config: JobConfig) -> None:
    """Keep `config` in its `job.dump_folder`; the paths of public inputs are made absolute."""
    values = dataclasses.asdict(config)
    for section, key in (("model", "hf_assets_path"), ("checkpoint", "initial_load_path")):
        if path := values[section][key]:
            values[section][key] = os.path.abspath(path)
    write_atomically(
        os.path.join(config.job.dump_folder, RUN_CONFIG_FILE),
        json.dumps(values, indent=2).encode() + b"\n",
    )


def read_config(folder: str) -> JobConfig:
    """Return the configuration of the run in `folder` for one process, on any mesh.

    `job.dump_folder` becomes `folder`: a run may have been moved.

    Raises:
        ValueError: one line for the user.
    """
    path = os.path.join(folder, RUN_CONFIG_FILE)
    if not os.path.isfile(path):
        raise ValueError(
            f"RUN = '{folder}': {RUN_CONFIG_FILE}, which describes its model, is missing; give the "
            "training command again, which writes it (a finished run is not trained further)"
        )
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
        values["job"]["dump_folder"] = folder
        values["parallelism"].update(dict.fromkeys(_ONE_PROCESS, 1))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}): restore it") from error
    return config_from_values(values, path, world_size=1)
