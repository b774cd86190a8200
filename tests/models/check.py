"""What a start is told of its model."""

from tests.processes.runs import CONFIG


def mistake(*options: str) -> str:
    """What `check_model` says of a start with these options; "" if nothing."""
    from torchtitan_dp.checkpoint.start import decide_start
    from torchtitan_dp.config.load import load_config
    from torchtitan_dp.preflight.check import check_model

    try:
        config = load_config(["--job.config_file", str(CONFIG), *options], 1)
        check_model(config, decide_start(config))
    except ValueError as error:
        return str(error)
    return ""
