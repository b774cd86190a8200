"""The padded lengths of samples: few, rising by two at most, and whole tiles of attention."""

import pytest

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import ladder, ring_is_aligned
from torchtitan_dp.config.load import load_config
from torchtitan_dp.distributed import devices

T = 32


def configured(*overrides: str, seq_len: int = T, cp: int = 1) -> JobConfig:
    basics = ["--privacy.noise_multiplier=1", "--privacy.delta=1e-5"]
    sizes = [f"--training.seq_len={seq_len}", f"--parallelism.context_parallel_degree={cp}"]
    return load_config([*basics, *sizes, "--training.global_batch_size=4", *overrides], cp)


def test_ladder() -> None:
    assert ladder(configured()) == (2, 4, 8, 16, 32)
    assert ladder(configured(cp=2)) == (4, 8, 16, 32)
    assert ladder(configured(seq_len=36)) == (2, 4, 8, 16, 32, 36)
    assert ladder(configured(seq_len=36, cp=3)) == (6, 12, 24, 36)
    assert ladder(configured(seq_len=2)) == (2,)
    assert ladder(configured("--data.no-length_buckets")) == (T,)


def test_rungs_on_an_accelerator_fill_attention_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring's parts have 128 tokens at least; without a ring, and on CPU, nothing changes."""
    on_cpu = ladder(configured(seq_len=1024, cp=2))
    alone = ladder(configured(seq_len=1024))
    monkeypatch.setattr(devices, "has_accelerator", lambda: True)
    for seq_len, cp in [(1024, 2), (1000, 2), (131072, 8), (64, 2), (96, 3)]:
        rungs = ladder(configured(seq_len=seq_len, cp=cp))
        assert rungs[-1] == seq_len
        assert all(length % (256 * cp) == 0 for length in rungs[:-1])
        assert ring_is_aligned(configured(seq_len=seq_len, cp=cp)) == (seq_len % (256 * cp) == 0)
    assert ladder(configured(seq_len=2048, cp=2)) == (512, 1024, 2048)
    assert on_cpu == (8, 16, 32, 64, 128, 256, 512, 1024)
    assert ladder(configured(seq_len=1024)) == alone


@pytest.mark.parametrize(("ranks", "seq_len", "cp"), [(3, 256, 1), (6, 256, 2), (6, 36, 6)])
def test_ranks_that_are_left_share_a_sample_in_equal_parts(ranks, seq_len, cp):
    given = "--parallelism.context_parallel_degree=auto"
    parallelism = configured(given, seq_len=seq_len, cp=ranks).parallelism
    assert parallelism.context_parallel_degree == cp
    assert parallelism.data_parallel_shard_degree * cp == ranks
