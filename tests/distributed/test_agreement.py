"""What a hostile review found: ranks that disagree, and folders that mix private and plain runs."""

import os
import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import accounts, build
from tests.hazards.test_ledgers import records
from tests.hazards.test_trainer import SETTINGS, bookkeeping
from tests.processes.ranks import on_ranks
from torchtitan_dp.base.process import Fault
from torchtitan_dp.checkpoint.bookkeeping import Bookkeeping
from torchtitan_dp.checkpoint.plan import Plan, refuse_private_folder
from torchtitan_dp.checkpoint.start import decide_start
from torchtitan_dp.distributed.agreement import require_agreement
from torchtitan_dp.ledger import Lineage


def agreement(differing: tuple[str, ...]) -> str:
    """The refusal of this rank, whose terms of these names are its own; each rank has its copy."""
    terms = {"the records": "secret", "the privacy settings": "sigma = 1"}
    for name in differing:
        terms[name] += f" of rank {dist.get_rank()}"
    try:
        require_agreement(terms)
    except Fault as error:
        return str(error)
    return "agreed"


def test_ranks_that_see_other_records_refuse_to_train():
    """All of them, in the same words: the log that people read is rank 0's."""
    assert on_ranks(2, agreement, ()) == ["agreed", "agreed"]
    refusals = on_ranks(4, agreement, ("the records",))
    assert set(refusals) == {refusals[0]}
    assert refusals[0].startswith(
        "error: ranks disagree on the records (rank 1 is the first to differ from rank 0): "
    )
    assert "the privacy settings and the records" not in refusals[0]
    both = on_ranks(2, agreement, ("the records", "the privacy settings"))
    assert "ranks disagree on the records and the privacy settings (" in both[0]


def sent_in_agreement(differ: bool) -> bytes:
    """All that an agreement hands to the collectives of torch.distributed."""
    gather, sent = dist.all_gather_object, []

    def noted(gathered, value, *args):
        sent.append(pickle.dumps(value))
        gather(gathered, value, *args)

    with (
        mock.patch.object(dist, "all_gather_object", noted),
        mock.patch.object(dist, "broadcast_object_list", None),
    ):
        agreement(("the records",) if differ else ())
    return b"".join(sent)


@pytest.mark.parametrize("differ", [False, True])
def test_digests_alone_are_sent_and_none_is_named(differ):
    """Names and sizes of files can be guessed from their hash, and the log is kept by others."""
    for sent in on_ranks(2, sent_in_agreement, differ):
        assert sent
        assert b"secret" not in sent
    refusal, _ = on_ranks(2, agreement, ("the records",))
    assert "secret" not in refusal
    assert "sigma" not in refusal


def opening(folder: str, differ: str) -> str:
    """A start on two ranks, one of which was given another way to share out a sample's tokens."""
    os.makedirs(f"{folder}/out", exist_ok=True)
    balancer = "None" if differ == "the configuration" and dist.get_rank() else "headtail"
    tokens = "u" if differ == "the tokens" and dist.get_rank() else "t"
    own = Path(folder, f"node_{dist.get_rank()}", "w")  # one path, on the disks of two nodes
    own.mkdir(parents=True)
    content = b"others" if differ == "the initial weights" and dist.get_rank() else b"weights"
    (own / "model.safetensors").write_bytes(content)
    config = build.config(
        f"--job.dump_folder={folder}/out",
        f"--parallelism.context_parallel_load_balancer={balancer}",
        *("--checkpoint.enable", "--checkpoint.initial_load_in_hf"),
        *("--checkpoint.initial_load_path=w", "--privacy.initial_weights_public"),
    )
    before = os.getcwd()
    os.chdir(own.parent)
    try:
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
            Bookkeeping(config, records(tokens), decide_start(config), torch.device("cpu"))  # type: ignore[arg-type]
    except Fault as error:
        return str(error)
    finally:
        os.chdir(before)
    return "agreed"


@pytest.mark.parametrize("differ", ["the configuration", "the tokens", "the initial weights"])
def test_ranks_that_differ_refuse_to_train(tmp_path, differ):
    """No term of the guarantee differs, and yet tokens could be missing, or be there twice."""
    for refusal in on_ranks(2, opening, str(tmp_path / "other"), differ):
        assert f"ranks disagree on {differ} (" in refusal
    assert on_ranks(2, opening, str(tmp_path / "same"), "") == ["agreed", "agreed"]


def settled_ledger() -> str:
    """The ledger of a start, on this rank, where each would settle another."""
    books = bookkeeping(Lineage(SETTINGS))
    books._settle(lambda: Plan(Lineage(SETTINGS, steps=dist.get_rank()), 1, 0.0, 0.0, ()))
    return books.ledger.to_json()


def test_ranks_keep_one_ledger():
    """Any of them may be the one that writes it into a checkpoint: with four, the third is."""
    first, *others = on_ranks(4, settled_ledger)
    assert others == [first] * 3


def test_a_run_without_privacy_may_not_use_a_private_folder(tmp_path):
    refuse_private_folder(str(tmp_path))
    accounts.publish(Lineage(SETTINGS), tmp_path)
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
