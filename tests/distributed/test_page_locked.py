"""Page-locked memory: how much a buffer takes, and that its pages are unlocked before they go."""

import gc
from pathlib import Path

import pytest
import torch

from torchtitan_dp.distributed import host_memory as module
from torchtitan_dp.distributed.host_memory import EXACT_FROM, page_locked, page_locked_bytes

GIB, PAGE = 2**30, module.mmap.PAGESIZE
WASTEFUL = EXACT_FROM + PAGE + 6  # of bytes: the next power of two would be nearly twice as much
CUDA = torch.device("cuda")


def is_mapped(pointer: int) -> bool:
    """Whether this process has memory there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= pointer < int(end, 16):
            return True
    return False


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Sizes by address of what is locked, as CUDA would know them; unlocking needs the memory."""
    known: dict[int, int] = {}

    def unlock(pointer: int) -> None:
        assert is_mapped(pointer)
        del known[pointer]

    monkeypatch.setattr(module, "_lock", known.__setitem__)
    monkeypatch.setattr(module, "_unlock", unlock)
    return known


@pytest.mark.parametrize(
    ("size", "taken"),
    [
        (1, 1),
        (192, 256),
        (EXACT_FROM - 1, EXACT_FROM),
        (4 * GIB, 4 * GIB),  # 524,288 tokens of 4,096 values in bf16
        (3 * GIB, 3 * GIB),  # of 3,072 values
        (5 * GIB + 1, 5 * GIB + PAGE),
    ],
)
def test_a_large_buffer_takes_its_pages_and_a_small_one_a_power_of_two(
    size: int, taken: int
) -> None:
    assert page_locked_bytes(size) == taken


def test_a_buffer_is_unlocked_once_when_its_last_view_goes(locked: dict[int, int]) -> None:
    buffer = page_locked(WASTEFUL // 2, torch.bfloat16, CUDA)
    assert (buffer.dtype, buffer.numel()) == (torch.bfloat16, WASTEFUL // 2)
    pointer = buffer.data_ptr()
    assert locked == {pointer: page_locked_bytes(WASTEFUL)}
    assert pointer % PAGE == 0
    view = buffer.detach()[7:9].view(2, 1)  # shares the storage alone
    view.fill_(3)
    del buffer
    gc.collect()
    assert locked
    assert view.tolist() == [[3], [3]]
    del view
    assert not locked
    assert not is_mapped(pointer)


def test_pages_that_cannot_be_locked_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def refuse(pointer: int, size: int) -> None:
        tried.append(pointer)
        raise RuntimeError("out of memory (2)")

    monkeypatch.setattr(module, "_lock", refuse)
    monkeypatch.setattr(module, "_unlock", lambda _: pytest.fail("it was never locked"))
    with pytest.raises(RuntimeError, match="out of memory"):
        page_locked(WASTEFUL, torch.uint8, CUDA)
    gc.collect()
    assert not is_mapped(tried[0])


@pytest.mark.parametrize("size", [EXACT_FROM // 2 + 1, 2 * EXACT_FROM])
def test_where_nothing_is_wasted_pytorch_allocates(
    size: int, locked: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, empty = [], torch.empty

    def pinned(numel: int, *, pin_memory: bool = False, **terms: object) -> torch.Tensor:
        asked.append((numel, pin_memory))
        return empty(numel, **terms)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", pinned)
    page_locked(size, torch.uint8, CUDA)
    assert (asked, locked) == ([(size, True)], {})


def test_on_a_cpu_nothing_is_locked(locked: dict[int, int]) -> None:
    buffer = page_locked(WASTEFUL, torch.uint8, torch.device("cpu"))
    assert buffer.numel() == WASTEFUL
    assert not locked


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_pages_are_locked_and_unlocked() -> None:
    """Not run on a device yet. `is_pinned` asks the driver; a second time round leaves no trace."""
    for _ in range(2):
        buffer = page_locked(WASTEFUL, torch.uint8, CUDA)
        pointer = buffer.data_ptr()
        assert buffer.is_pinned()
        there = torch.arange(WASTEFUL, device=CUDA) % 251
        buffer.copy_(there.to(torch.uint8), non_blocking=True)
        back = buffer.to(CUDA, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(back.long(), there)
        assert torch.equal(buffer.long(), there.cpu())
        del buffer
        assert not is_mapped(pointer)
    torch.cuda.synchronize()
