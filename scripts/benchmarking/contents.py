"""How fast the pass over all files finds lines and hashes contents (`data.records.hashing`).

    python scripts/benchmarking/contents.py [--gigabytes 1] [--rounds 3] [--folder /tmp]

Makes jsonl lines and small text files in a folder of its own, and prints a table: GB/s, the best of
the rounds, with the page cache cold (as far as the kernel drops what it is asked to) and warm, by
the number of threads; and GB per CPU second, which
says more on a machine that others use too.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from unittest import mock

import numpy as np

from torchtitan_dp.data.records import hashing
from torchtitan_dp.data.records.files import Files, list_files, locate

LINE_BYTES, SMALL_FILE_BYTES = 240, 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        size = int(options.gigabytes * 1e9)
        lines = _written(os.path.join(folder, "jsonl"), [size])
        small = _written(
            os.path.join(folder, "text"), [SMALL_FILE_BYTES] * (size // (16 * SMALL_FILE_BYTES))
        )
        print(f"{os.cpu_count()} CPUs; {lines.starts[-1] / 1e9:.2f} GB in one jsonl file, ", end="")
        print(f"{small.starts[-1] / 1e9:.2f} GB in {len(small):,} text files; GB/s")
        print("| pass | threads | cold | warm | a CPU second, warm |")
        print("| --- | --- | --- | --- | --- |")
        cores = range(1, len(os.sched_getaffinity(0)) + 1)
        for threads in [count for count in (1, 2, 4, 8) if count in cores]:
            for name, files, work in (
                ("lines and hash", lines, _lines),
                ("hash, text", small, hashing.read_contents),
            ):
                cold, warm = (
                    [_rates(files, work, threads, cold) for _ in range(options.rounds)]
                    for cold in (True, False)
                )
                best = (*np.max(cold, axis=0)[:1], *np.max(warm, axis=0))
                cells = " | ".join(f"{rate:.2f}" for rate in best)
                print(f"| {name} | {threads} | {cells} |", flush=True)


def _newlines(leaf: np.ndarray) -> np.ndarray:
    return np.flatnonzero(leaf == 0x0A)


def _lines(files: Files) -> object:
    return hashing.read_contents(files, scan=_newlines, take=lambda *_: None)


def _rates(
    files: Files, work: Callable[[Files], object], threads: int, cold: bool
) -> tuple[float, float]:
    """GB a second and a CPU second."""
    for index in range(len(files) if cold else 0):
        handle = os.open(os.path.join(files.root, files.names[index]), os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    with mock.patch.object(os, "sched_getaffinity", return_value=range(threads)):
        begin, cpu = time.perf_counter(), time.process_time()
        work(files)
        seconds = time.perf_counter() - begin, time.process_time() - cpu
    return int(files.starts[-1]) / seconds[0] / 1e9, int(files.starts[-1]) / seconds[1] / 1e9


def _written(folder: str, sizes: list[int]) -> Files:
    os.makedirs(folder)
    line = np.random.default_rng(0).integers(97, 123, 2**16 * LINE_BYTES, dtype=np.uint8)
    line[LINE_BYTES - 1 :: LINE_BYTES] = 0x0A
    block = line.tobytes()
    for number, size in enumerate(sizes):
        with open(os.path.join(folder, f"{number}.jsonl"), "wb") as file:
            for begin in range(0, size, len(block)):
                file.write(block[: size - begin])
            file.flush()
            os.fsync(file.fileno())
    return list_files(*locate(folder))


if __name__ == "__main__":
    main()
