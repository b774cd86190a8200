"""The held-out loss and its means by position, against one process and plain logits."""

import contextlib
import functools
import itertools
import math
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU
from tests.build import build, config, llama, reference_model
from tests.data.drawn import UNITS, dealt, loader, same, samples_of
from tests.data.stores import store_of
from tests.hazards.test_trainer import SETTINGS, bookkeeping
from tests.processes.ranks import on_ranks
from torchtitan_dp.checkpoint import bookkeeping as books_module
from torchtitan_dp.data.batching import Draw, RecordLoader
from torchtitan_dp.data.dataset import Samples
from torchtitan_dp.ledger import Lineage
from torchtitan_dp.ledger.lineage import HeldOutLoss, NoisedLoss
from torchtitan_dp.models.causal_lm.settings import LoRA
from torchtitan_dp.train import trainer as train
from torchtitan_dp.train.validate import HeldOutValidator

SEQ_LEN = 320  # the last bucket ends within a power of four


# Some end in each bucket, and two are empty.
LENGTHS = (3, 0, 60, 61, 62, 63, 64, 65, 150, 0, 300, 400, 900)


@functools.cache
def samples() -> Any:
    """Samples of prompts and answers; the store stays open when its folder is gone."""
    texts = [
        "".join(chr(97 + (i * i + 5 * k) % 23) for i in range(n)) for k, n in enumerate(LENGTHS)
    ]
    rows = [{"prompt": text[: len(text) // 3], "text": text[len(text) // 3 :]} for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        store = store_of(rows, Path(folder), prompt_field="prompt")
    return Samples(store, SEQ_LEN, has_answers=True)


def model_args(rank: int) -> Any:
    lora = LoRA(rank, 8.0, ("q_proj", "o_proj")) if rank else None
    return llama(vocab_size=258, max_position_embeddings=SEQ_LEN, lora=lora)


def validated(degrees: tuple[int, int, int], rank: int, *overrides: str) -> dict[str, float]:
    """What one rank logs, with an average of weights that has the final norm's doubled."""
    overrides = (f"--training.seq_len={SEQ_LEN}", "--validation.steps=-1", *overrides)
    built = build(degrees, *overrides, args=model_args(rank))
    replicas = built.dims.dp_replicate * built.dims.dp_shard
    records = RecordLoader(
        samples(),
        np.arange(len(LENGTHS)),
        ranks=replicas,
        rank=torch.distributed.get_rank() // built.dims.cp,
        batch_size=2,
    )
    logged: dict[str, float] = {}
    metrics = SimpleNamespace(logger=SimpleNamespace(log=lambda losses, _: logged.update(losses)))
    settings = config(*overrides, degrees=degrees)
    validator = HeldOutValidator(records, settings, built.dims, metrics)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def doubled() -> Any:
        built.model.model.model.norm.weight.mul_(2)
        yield
        built.model.model.model.norm.weight.div_(2)

    validator.average = SimpleNamespace(in_place_of_weights=doubled)  # type: ignore[assignment]
    loss = validator.validate([built.model], 1)
    assert logged["heldout_loss"] == loss
    published = validator.losses([built.model])
    return logged | {f"unit {i}": float(one) for i, one in enumerate(published)}


def by_hand(rank: int) -> dict[str, float]:
    """The same of plain logits, one unit and one token after the other."""
    model, store, told = reference_model(model_args(rank)), samples(), {}
    for name in ("heldout_loss", "heldout_loss_ema"):
        means, at = [], defaultdict(list)
        units = {f"unit {i}": 0.0 for i in range(len(LENGTHS))}
        for unit in range(len(LENGTHS)):
            found = store.ids(unit)
            if not (found[1:] >= 0).any():
                continue
            ids = torch.from_numpy(np.where(found < 0, ~found, found))
            with torch.no_grad():
                logits_TV = model(ids[None, :-1])[0]
            loss_T = F.cross_entropy(logits_TV.double(), ids[1:], reduction="none").tolist()
            learned = [(i, loss) for i, loss in enumerate(loss_T) if found[i + 1] >= 0]
            means.append(math.fsum(loss for _, loss in learned) / len(learned))
            units[f"unit {unit}"] = means[-1]
            for i, loss in learned:
                at["0-64" if i < 64 else "64-256" if i < 256 else "256-320"].append(loss)
        told[name] = math.fsum(means) / len(means)
        told |= {f"{name}_at/{where}": math.fsum(x) / len(x) for where, x in at.items()}
        with torch.no_grad():
            model.model.model.norm.weight.mul_(2)
    return told | units  # those of the average, which a release has


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees, rank, overrides",
    [
        ((1, 1, 1), 0, ("--training.loss_chunk_tokens=7",)),
        ((1, 1, 1), 4, ("--training.loss_chunk_tokens=0",)),
        ((1, 1, 2), 0, ()),
        ((1, 1, 2), 0, ("--parallelism.context_parallel_load_balancer=None",)),
        ((2, 1, 1), 0, ("--privacy.gradient_method=grad_sample",)),
        ((1, 2, 2), 4, ("--privacy.gradient_method=ghost",)),
    ],
)
def test_every_mesh_logs_the_losses_of_plain_logits(
    degrees: tuple[int, int, int], rank: int, overrides: tuple[str, ...]
) -> None:
    expected = by_hand(rank)
    assert len(expected) == 8 + len(LENGTHS)
    for logged in on_ranks(math.prod(degrees), validated, degrees, rank, *overrides):
        assert logged == pytest.approx(expected, rel=1e-5)


def test_it_takes_the_first_microbatches_alike_on_all_ranks(tmp_path: Path) -> None:
    of, _ = samples_of(tmp_path, UNITS)
    for rank, (steps, count) in itertools.product((0, 1), ((2, 2), (0, 0), (-1, 4), (99, 4))):
        one = loader(of, 2, rank, batch_size=3)
        settings: Any = SimpleNamespace(
            validation=SimpleNamespace(steps=steps), training=SimpleNamespace(seq_len=8)
        )
        nothing: Any = None
        found = dealt(one, Draw(HeldOutValidator(one, settings, nothing, nothing)._positions()))
        assert len(found) == count
        assert same(found, dealt(one, Draw(np.arange(21)))[:count])


def test_row66_a_loss_is_in_the_log_before_its_noise_is_drawn(monkeypatch: Any) -> None:
    order: list[str] = []

    def noise(losses_N: Any, *, noise_multiplier: float, clip: float, key: bytes) -> float:
        order.append("noise")
        return float(losses_N.mean()) + noise_multiplier + clip

    def tell(found: str) -> str:
        order.append("tell")
        return found

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(books_module, "broadcast_from_rank0", tell)
    monkeypatch.setattr(books_module, "noised_mean", noise)
    books = bookkeeping(Lineage(SETTINGS, steps=3, heldout_loss=HeldOutLoss(2.0, 4.0, 1e-5, 1.0)))
    books.log = SimpleNamespace(begin_loss=lambda step: order.append(f"log {step}"))
    noised = books.publish_loss(lambda: np.array([1.0, 3.0]))
    assert noised == NoisedLoss(3, 8.0, 2.0 * 4.0 / 2)
    assert order == ["log 3", "noise", "tell"]
    kept = books.ledger.heldout_loss
    assert (kept.noised, kept.begun) == (noised, 1)
    assert books.publish_loss(lambda: 1 / 0) is None  # once: nothing is evaluated again


def noised_on_a_rank(folder: str) -> tuple[float, bool]:
    """A result, and whether it was in the log before the rank had it; other losses on each rank."""
    rank, log = torch.distributed.get_rank(), Path(folder) / "log"

    def begin(step: int) -> None:
        time.sleep(1)  # a slow disk: the others wait for it
        log.touch()

    books = bookkeeping(Lineage(SETTINGS, steps=3, heldout_loss=HeldOutLoss(2.0, 4.0, 1e-5, 1.0)))
    books.log = SimpleNamespace(begin_loss=begin)
    noised = books.publish_loss(lambda: np.array([1.0 + rank, 3.0]))
    assert noised is not None
    return noised.loss, log.exists()


@pytest.mark.slow
def test_row66_all_ranks_have_one_noised_loss_none_before_it_is_in_the_log(tmp_path: Any) -> None:
    first, second = on_ranks(2, noised_on_a_rank, str(tmp_path))
    assert first == second
    assert first[1]


@pytest.mark.parametrize("private", [True, False])
def test_row66_a_noised_loss_of_weights_without_privacy_is_labelled(
    private: bool, monkeypatch: Any
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(train, "logger", SimpleNamespace(info=lines.append))
    trainer = MagicMock()
    trainer.ledger.private = private
    trainer.books.publish_loss.return_value = NoisedLoss(3, 7.0, 1.0)
    train.DPTrainer._publish_loss(trainer)
    (line,) = lines
    assert line.startswith("step: 3/3  " + ("" if private else "not private: ") + "held-out loss w")
    trainer.metrics_processor.logger.log.assert_called_once_with({"heldout_loss_noised": 7.0}, 3)
