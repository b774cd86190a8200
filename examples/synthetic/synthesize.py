"""Writes synthetic records with a released model, and judges them.

    python examples/synthetic/synthesize.py RUN RELEASE OUT.jsonl [--records 400]

RUN is the folder of a private run, RELEASE a whole model that was released from it (of adapters,
with --merged). OUT.jsonl follows from the release alone, so it is as private as that. All that is
printed compares with the private records, and is NOT private.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan_dp.config.load import read_config
from torchtitan_dp.data.dataset import Records
from torchtitan_dp.train.check import open_records

LENGTH, GRAM = 512, 16  # tokens of a record that are written and read; of a copied passage
AT_ONCE, STEPS, BATCH = 50, 150, 16
Ids = list[np.ndarray]


def synthesize(model: torch.nn.Module, begin: int, end: int, count: int) -> Ids:
    """Sample records from the model: their ids, without marks."""
    torch.manual_seed(0)
    found: Ids = []
    while len(found) < count:
        start = torch.full((AT_ONCE, 1), begin)
        how = {
            "do_sample": True,
            "max_new_tokens": LENGTH,
            "eos_token_id": end,
            "pad_token_id": end,
        }
        written = model.generate(start, attention_mask=torch.ones_like(start), **how)
        found += [one[1:][one[1:] != end].numpy() for one in written]
    return found[:count]


def read(records: Records, units: Sequence[int]) -> Ids:
    """Read the first record of each unit, as the store has it: private."""
    store = records.store
    first = (int(store.units.members[store.units.places(int(unit))[0]]) for unit in units)
    found = (store.ids(record, 0, LENGTH) for record in first)
    return [np.where(ids < 0, ~ids, ids) for ids in found if len(ids) > GRAM]


def passages(ids: np.ndarray) -> np.ndarray:
    """Hash each run of `GRAM` ids."""
    if len(ids) < GRAM:
        return np.empty(0, dtype=np.uint64)
    runs = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), GRAM)
    powers = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, GRAM + 1, dtype=np.uint64)
    return (runs * powers).sum(axis=1)


def copied(synthetic: Ids, real: Ids) -> tuple[float, float]:
    """Return the share of synthetic passages that real records have, and a record's largest."""
    known = np.unique(np.concatenate([passages(ids) for ids in real]))
    found = [np.isin(passages(ids), known) for ids in synthetic if len(ids) >= GRAM]
    return float(np.concatenate(found).mean()), max(float(one.mean()) for one in found)


def tuned(folder: str, records: Ids) -> torch.nn.Module:
    """Tune a model on records, without privacy."""
    model, rng = AutoModelForCausalLM.from_pretrained(folder), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        chosen = [records[i] for i in rng.integers(len(records), size=BATCH)]
        ids = np.full((BATCH, max(map(len, chosen))), -100)
        for row, one in zip(ids, chosen, strict=True):
            row[: len(one)] = one
        labels = torch.from_numpy(ids)
        model(input_ids=labels.clamp(min=0), labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def loss(model: torch.nn.Module, records: Ids) -> float:
    """Return the mean loss of records, nats a token."""
    texts = [torch.from_numpy(ids)[None] for ids in records]
    return float(np.mean([model(input_ids=ids, labels=ids).loss.item() for ids in texts]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("run", "release", "out"):
        parser.add_argument(name)
    parser.add_argument("--records", type=int, default=400)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.release)
    model = AutoModelForCausalLM.from_pretrained(options.release)
    synthetic = synthesize(model, tokenizer.bos_token_id, tokenizer.eos_token_id, options.records)
    lines = [json.dumps({"text": tokenizer.decode(ids)}) + "\n" for ids in synthetic]
    Path(options.out).write_text("".join(lines), encoding="utf-8")
    print(f"{options.out}: {len(synthetic)} records, as private as {options.release}")

    config = read_config(options.run)
    records = open_records(config)
    heldout = read(records, records.heldout)
    others = np.random.default_rng(0).permutation(records.train)
    train = read(records, others)
    for name, real in (("training", train[: len(heldout)]), ("held-out", heldout)):
        share, most = copied(synthetic, real)
        print(
            f"not private: of passages of {GRAM} tokens, {share:.2%} are in {len(real)} {name} "
            f"records; of one record at most {most:.0%}"
        )
    base = config.model.hf_assets_path
    with_marks = [np.concatenate([[tokenizer.bos_token_id], ids]) for ids in synthetic]
    for name, judged in (
        ("the public model", AutoModelForCausalLM.from_pretrained(base)),
        ("the same, tuned on the synthetic records", tuned(base, with_marks)),
        ("the release itself", model),
        ("the public model, tuned on real records without privacy", tuned(base, train)),
    ):
        print(f"not private: held-out loss of {name}: {loss(judged, heldout):.3f}")


if __name__ == "__main__":
    main()
