"""How fast records are tokenized into a store, and in how much memory.

    python scripts/benchmarking/prepare.py [--gigabytes 1] [--tokenizer FOLDER] [--folder /tmp]

Makes jsonl lines of about 8 kB from the source of Python's standard library and prepares them in a
process of its own; without a tokenizer's folder, with a byte-level BPE of 32,000 tokens of the same
texts, and `--tokenizer bytes` as bytes. Prints a table: MB/s of the file and for each core, the
process's peak memory, and the speed as a fraction of the tokenizer's own: of one call for each 8
million characters of the same texts, in memory, on all cores.
"""

import argparse
import json
import multiprocessing
import os
import resource
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torchtitan_dp.data.prepare import Source, prepared
from torchtitan_dp.data.reading import Reading
from torchtitan_dp.data.tokenizer import load_tokenizer

LINE_CHARACTERS, VOCABULARY, BATCH_LINES = 8000, 32_000, 1000
MOST_OWN_BYTES = 2e8  # that the tokenizer's own speed is measured with


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--tokenizer", metavar="FOLDER")
    parser.add_argument("--folder")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        lines = Path(folder) / "lines.jsonl"
        size = _write(lines, int(options.gigabytes * 1e9))
        assets = options.tokenizer or _trained(Path(folder) / "tokenizer")
        assets = "" if assets == "bytes" else assets
        seconds, peak = _alone(_prepare, str(lines), assets, f"{folder}/store")
        bytes_read, own, _ = _alone(_encode, str(lines), assets)
    rate, alone = size / seconds / 1e6, bytes_read / own / 1e6
    print("| file, GB | cores | MB/s | a core | peak memory, MiB | of the tokenizer's own speed |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(
        f"| {size / 1e9:.2f} | {cores} | {rate:.2f} | {rate / cores:.2f} | {peak:,.0f} "
        f"| {rate / alone:.2f} |"
    )


def _alone(work: Callable[..., float | tuple[float, float]], *arguments: str) -> tuple[float, ...]:
    """Run `work` in a process of its own; return its results and the process's peak, in MiB."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(work, arguments)
        results = found if isinstance(found, tuple) else (found,)
        return (*results, pool.apply(_peak_mib))


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _prepare(path: str, assets: str, place: str) -> float:
    source = Source("jsonl", path, Reading("text"), load_tokenizer(assets))
    begun = time.perf_counter()
    prepared(source, place)
    return time.perf_counter() - begun


def _encode(path: str, assets: str) -> tuple[float, float]:
    """Return the bytes of the lines, and the seconds that their texts took."""
    tokenizer, done, seconds = load_tokenizer(assets), 0, 0.0
    with open(path, "rb") as file:
        while done < MOST_OWN_BYTES and (lines := list(_first(file, BATCH_LINES))):
            texts = [json.loads(line)["text"] for line in lines]
            begun = time.perf_counter()
            tokenizer.encode_each(texts)
            seconds += time.perf_counter() - begun
            done += sum(map(len, lines))
    return float(done), seconds


def _first(lines: Iterator[bytes], count: int) -> Iterator[bytes]:
    for _, line in zip(range(count), lines, strict=False):
        yield line


def _texts() -> str:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    return "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in paths)


def _write(path: Path, size: int) -> int:
    text, done, number = _texts(), 0, 0
    with open(path, "wb") as file:
        while done < size:
            at = number * 7919 % (len(text) - LINE_CHARACTERS)  # a prime: other lines each time
            line = json.dumps({"text": text[at : at + LINE_CHARACTERS]}).encode() + b"\n"
            file.write(line)
            done, number = done + len(line), number + 1
    return done


def _trained(folder: Path) -> str:
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    backend, text = tokenizers.Tokenizer(models.BPE()), _texts()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False)
    parts = (text[i : i + 100_000] for i in range(0, len(text), 100_000))
    backend.train_from_iterator(parts, trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


if __name__ == "__main__":
    main()
