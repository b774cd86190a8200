"""The packages that a configuration asks for beside those that every run needs."""

import importlib.util

from torchtitan_dp.config import JobConfig


def check_packages(config: JobConfig) -> None:
    """Refuse a service whose package is not installed.

    Raises:
        ValueError: one line for the user.
    """
    for key, wanted, package in (
        ("metrics.enable_wandb", config.metrics.enable_wandb, "wandb"),
        ("metrics.enable_mlflow", config.metrics.enable_mlflow, "mlflow"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{key} = true: the package {package} is not installed; "
                f"pip install 'torchtitan-dp[{package}]', or set {key} to false"
            )
