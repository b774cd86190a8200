"""Checks before anything is started, by the plan and by every worker of a run.

`torchrun -m torchtitan_dp.train` is a way to start a run too, without a plan, and a mistake that a
record brings to light after some steps would reveal that record (hazard row 47).
"""

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_dp.checkpoint.initial import refuse_private_folder
from torchtitan_dp.checkpoint.losses import refuse_delta_of_losses
from torchtitan_dp.checkpoint.plan import Plan, earlier_ledger
from torchtitan_dp.checkpoint.start import (
    Start,
    check_records,
    decide_start,
    plan_start,
    refuse_another_decay,
    refuse_another_optimizer,
)
from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.dataset import Records
from torchtitan_dp.data.samples.conversations import Reading, reading
from torchtitan_dp.data.samples.excerpts import scan_undecodable
from torchtitan_dp.data.samples.tokenizer import Tokenizer, load_tokenizer
from torchtitan_dp.models.families import ModelArgs
from torchtitan_dp.preflight.model import check_model
from torchtitan_dp.preflight.packages import check_packages

_WHOLE = 2**62, 2**62  # more than a record's text can have, or cost


@dataclass(frozen=True)
class Checked:
    """The start, model, records and plan of a checked configuration."""

    start: Start
    args: ModelArgs
    records: Records
    plan: Plan | None  # None without privacy


def open_records(config: JobConfig) -> Records:
    """Open the records that a configuration names; raise ValueError, one line, if it cannot."""
    data, privacy = config.data, config.privacy
    return Records.open(
        config.training.dataset,
        config.training.dataset_path or "",
        text_field=data.text_field,
        prompt_field=data.prompt_field,
        messages_field=data.messages_field,
        unit_field=data.unit_field,
        heldout_fraction=data.heldout_fraction,
        needs_heldout=config.validation.enable,
        number_is_secret=privacy.enable and privacy.sample_rate is not None,
        in_groups=privacy.enable and privacy.noise == "banded",
    )


def check_run(
    config: JobConfig,
    open_records: Callable[[JobConfig], Records] = open_records,
    *,
    share: tuple[int, int] = (0, 1),
) -> Checked:
    """Check all of a run that one plain process can, and write nothing.

    Args:
        open_records: the function above, or one that keeps its result.
        share: this process and how many there are with the same files; with
            `data.on_undecodable` = "error" each reads a part of the records.

    Raises:
        ValueError: one line for the user.
    """
    check_packages(config)
    start = decide_start(config)
    refuse_another_decay(config, start)
    refuse_another_optimizer(config, start)
    args = check_model(config, start)
    how = build_reading(config)
    records = open_records(config)
    if config.data.on_undecodable == "error":
        _refuse_undecodable(records, how, *share)
    folder = config.job.dump_folder
    if not config.privacy.enable:
        refuse_private_folder(folder)
        return Checked(start, args, records, None)
    refuse_delta_of_losses(config, len(records.heldout))
    check_records(folder, records.fingerprint, records.settings)
    plan = plan_start(config, len(records.train), start, earlier_ledger(folder))
    return Checked(start, args, records, plan)


def build_reading(config: JobConfig, tokenizer: Tokenizer | None = None) -> Reading | None:
    """Choose how records with answers are read; raise ValueError, one line, for a mistake.

    Args:
        tokenizer: of `model.hf_assets_path`, if it was loaded already.
    """
    data, assets_path = config.data, config.model.hf_assets_path
    if data.prompt_field is data.messages_field is None:
        return None
    return reading(
        data.text_field,
        data.prompt_field,
        data.messages_field,
        assets_path,
        tokenizer or load_tokenizer(assets_path),
    )


def _refuse_undecodable(records: Records, how: Reading | None, part: int, parts: int) -> None:
    """Raise ValueError if one of this part's records cannot be decoded."""
    mine = records.train[part::parts]
    count = sum(len(records.units.places(unit)) for unit in mine)
    every = (record for unit in mine for record in records.units.records(unit))
    store = records.store

    def is_read(record: int) -> bool:
        fields = store.fields(record)
        return how is not None and fields is not None and how.read(fields, *_WHOLE) is not None

    bad = scan_undecodable(store.is_decodable if how is None else is_read, every, count)
    if bad:
        raise ValueError(
            f"data.on_undecodable = 'error': {bad} of {count} records cannot be decoded; fix "
            "them, or set it to 'empty' (they then contribute nothing)"
            + "".join(f"; not private: {warning}" for warning in records.warnings)
        )
