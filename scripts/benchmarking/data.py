"""The real loader against a step that only sleeps: the share of the time that the step waits.

Records of about 90 kB are made of the texts at hand (the source of Python's standard library), and
a byte-level BPE of 32,000 tokens of the same texts. Each rank of one context-parallel group takes
steps of 16 samples: each microbatch is fetched as training does, and then slept on, 150 ms for
16,384 tokens, in proportion for others. An epoch draws every record once. The process group and the
store of tokens are there before. Ranks that sleep do not wake at the same time, and wait for each
other once a step: the same steps with an all-reduce and no loader show how much of the waiting is
that.
"""

import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_dp.data.batching import Draw, RecordLoader
from torchtitan_dp.data.feed import Feed
from torchtitan_dp.data.prepare import Source, prepared
from torchtitan_dp.data.reading import Reading
from torchtitan_dp.data.samples import Samples
from torchtitan_dp.data.tokenizer import load_tokenizer

from .processes import on_processes

SEQ_LEN, SLEEP_S, SAMPLES = 16_384, 0.150, 16
RECORDS, RECORD_BYTES, VOCABULARY = 96, 90_000, 32_000
RANKS = (1, 2)


def measure_data(folder: str, progress: Callable[[str], None]) -> Iterator[list[dict[str, Any]]]:
    """A row for each number of ranks and epoch: all that there are, after each number of ranks.

    Args:
        folder: an empty one; records, tokenizer and caches are made there.
        progress: called with a line of text, now and then.
    """
    progress("making records and a tokenizer")
    _write_records(Path(folder))
    rows: list[dict[str, Any]] = []
    for ranks in RANKS:
        progress(f"{ranks} ranks")
        waited = on_processes(ranks, _epochs, folder)
        *fractions, bare = np.max(waited, axis=0).round(4).tolist()
        for epoch, fraction in enumerate(fractions, start=1):
            row = {"epoch": epoch, "world_size": ranks, "seq_len": SEQ_LEN}
            rows.append({**row, "wait_fraction": fraction, "without_loader": bare})
            progress(str(rows[-1]))
        yield list(rows)


def data_table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "## The loader against a step that only sleeps",
        "",
        f"{RECORDS} records of {RECORD_BYTES:,} bytes, a BPE of {VOCABULARY:,} tokens, "
        f"{SAMPLES} samples a step, {1000 * SLEEP_S:.0f} ms of sleep for each; the rank that "
        "waits most. All records were tokenized before.",
        "",
        "| ranks of one cp group | T | epoch | share of the time that a step waits "
        "| with an all-reduce alone |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['world_size']} | {row['seq_len']:,} | {row['epoch']} "
        f"| {100 * row['wait_fraction']:.1f}% | {100 * row['without_loader']:.1f}% |"
        for row in rows
    ]
    return "\n".join(lines)


def _write_records(folder: Path) -> None:
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    text = "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in paths)
    rng = np.random.default_rng(0)
    (folder / "records").mkdir()
    for number in range(RECORDS):
        begin = int(rng.integers(len(text) - RECORD_BYTES))
        record = text[begin : begin + RECORD_BYTES]
        (folder / f"records/{number:04}.txt").write_text(record, encoding="utf-8")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False)
    parts = (text[i : i + 100_000] for i in range(0, len(text), 100_000))
    backend.train_from_iterator(parts, trainer)
    (folder / "tokenizer").mkdir()
    backend.save(str(folder / "tokenizer/tokenizer.json"))


def _epochs(folder: str, scratch: str) -> list[float]:
    """The share of its time that this rank waits: in two epochs, and without a loader."""
    ranks = int(os.environ["WORLD_SIZE"])
    os.environ["XDG_CACHE_HOME"] = f"{folder}/cache-{ranks}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokenizer = load_tokenizer(f"{folder}/tokenizer")
    store = prepared(Source("text", f"{folder}/records", Reading("text"), tokenizer))
    loader = RecordLoader(
        Samples(store, SEQ_LEN), np.arange(len(store)), ranks=1, rank=0, batch_size=1
    )
    ladder = tuple(SEQ_LEN >> power for power in range(7, -1, -1))
    feed = Feed(loader, ladder, torch.device("cpu"))
    rng = np.random.default_rng(1)
    draws = [
        [Draw(np.sort(part)) for part in np.split(rng.permutation(RECORDS), RECORDS // SAMPLES)]
        for _ in range(2)
    ]
    found = []
    for steps in draws:
        dist.barrier()
        waited, begun = 0.0, time.perf_counter()
        for draw, following in zip(steps, [*steps[1:], None], strict=True):
            asked = time.perf_counter()
            for microbatch in feed.microbatches(draw, following):
                waited += time.perf_counter() - asked
                time.sleep(SLEEP_S * microbatch.tokens_BT.numel() / SEQ_LEN)
                asked = time.perf_counter()
            waited += time.perf_counter() - asked
        found.append(waited / (time.perf_counter() - begun))
    return [*found, _without_loader(ranks)]


def _without_loader(ranks: int) -> float:
    if ranks == 1:
        return 0.0
    zeros = torch.zeros(3, dtype=torch.int64)
    dist.barrier()
    waited, begun = 0.0, time.perf_counter()
    for number in range(RECORDS):
        asked = time.perf_counter()
        if number % SAMPLES == 0:
            dist.all_reduce(zeros)
        waited += time.perf_counter() - asked
        time.sleep(SLEEP_S)
    return waited / (time.perf_counter() - begun)
