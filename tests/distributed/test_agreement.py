"""What a hostile review found: ranks that disagree, and folders that mix private and plain runs."""

import json
import os

import pytest

from tests import build
from tests.ranks import on_ranks


def agreement(differ: bool) -> str:
    import torch.distributed as dist

    from torchtitan_dp.distributed.agreement import require_agreement

    terms = ("fingerprint", 100 + (dist.get_rank() if differ else 0))
    try:
        require_agreement(terms)
    except RuntimeError as error:
        return str(error)
    return "agreed"


def test_ranks_that_see_other_records_refuse_to_train():
    assert on_ranks(2, agreement, False) == ["agreed", "agreed"]
    first, second = on_ranks(2, agreement, True)
    assert first == "agreed"
    assert "ranks disagree" in second


def private_disagreement() -> str:
    import torch.distributed as dist

    from torchtitan_dp.distributed.agreement import require_agreement

    try:
        require_agreement(("sigma = 1",), private=(f"fingerprint of rank {dist.get_rank()}",))
    except RuntimeError as error:
        return str(error)
    return "agreed"


def test_what_ranks_disagree_on_is_not_told_if_it_is_private():
    """Names and sizes of files can be guessed from their hash, and the log is kept by others."""
    _, second = on_ranks(2, private_disagreement)
    assert "ranks disagree" in second
    assert "fingerprint of" not in second


def opening(folder: str, differ: bool) -> str:
    """A start on two ranks, one of which was given another way to share out a sample's tokens."""
    from types import SimpleNamespace
    from unittest import mock

    import numpy as np
    import torch.distributed as dist

    from torchtitan_dp.checkpoint.start import decide_start
    from torchtitan_dp.train import DPTrainer

    os.makedirs(folder, exist_ok=True)
    balancer = "None" if differ and dist.get_rank() else "headtail"
    config = build.config(
        f"--job.dump_folder={folder}",
        f"--parallelism.context_parallel_load_balancer={balancer}",
    )
    trainer = SimpleNamespace(
        job_config=config, dataloader=SimpleNamespace(fingerprint="f" * 64, units=np.arange(10))
    )
    try:
        with mock.patch.object(dist, "barrier"):  # where the other rank would wait for torchrun
            DPTrainer._open_ledger(trainer, decide_start(config))  # type: ignore[arg-type]
    except RuntimeError as error:
        return str(error)
    return "agreed"


def test_ranks_with_other_configurations_refuse_to_train(tmp_path):
    """No term of the guarantee differs, and yet tokens could be missing, or be there twice."""
    assert "ranks disagree" in on_ranks(2, opening, str(tmp_path / "other"), True)[1]
    assert on_ranks(2, opening, str(tmp_path / "same"), False) == ["agreed", "agreed"]


def opened_account() -> str:
    """The ledger of a start, on this rank."""
    from types import SimpleNamespace
    from unittest import mock

    from tests.hazards.test_trainer import SETTINGS
    from torchtitan_dp import train
    from torchtitan_dp.ledger import ExecutedSteps, Ledger

    trainer = SimpleNamespace(
        ledger=Ledger(SETTINGS), executed=ExecutedSteps("/nowhere"), job_config=build.config()
    )
    with mock.patch.object(train, "Account"):
        train.DPTrainer._open_account(trainer)  # type: ignore[arg-type]
    return trainer.ledger.to_json()


def test_ranks_keep_one_ledger():
    """Any of them may be the one that writes it into a checkpoint: with four, the third is."""
    first, *others = on_ranks(4, opened_account)
    assert others == [first] * 3


def test_a_run_without_privacy_may_not_use_a_private_folder(tmp_path):
    from torchtitan_dp.ledger.baseline import refuse_private_folder

    refuse_private_folder(str(tmp_path))
    (tmp_path / "privacy.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match=r"privacy\.enable = false"):
        refuse_private_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("checkpoint.exclude_from_loading", "train_state"),
        ("checkpoint.load_step", "0"),
        ("checkpoint.folder", ""),
        ("checkpoint.folder", "../other"),
        ("checkpoint.folder", "/tmp/elsewhere"),
    ],
)
def test_ways_around_the_ledger_are_refused(key, value):
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        build.config(f"--{key}={value}")
