"""Count the bytes of live tensors, by what they are for, while a program runs.

Works for real tensors and for fake ones (`FakeTensorMode`), because it looks at storages alone:
each new one is counted once, under the label in force when it was made, until it is freed. Labels
are those of the source (`gradients.labels`); `tracking` adds what FSDP2 allocates by itself.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from torchtitan_dp import torch_private
from torchtitan_dp.gradients.labels import TRACKER
from torchtitan_dp.models.parameters import local_part
from torchtitan_dp.torch_private import DispatchMode, tree_iter, unsharded_gradients

M = TypeVar("M", bound="LocalOperators")


class LocalOperators(DispatchMode):
    """A dispatch mode that calls `ran` after each operator on local tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._paused = False
        self._stack = contextlib.ExitStack()

    def __enter__(self: M) -> M:
        # DTensor tries operators on tensors of the whole shape, which exist nowhere.
        self._stack.enter_context(wrapped(*torch_private.shape_propagation(), self._pause))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operators come next
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._paused:
            self.ran(func, args, kwargs, result)
        return result

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Record a dispatched operator."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _pause(self, *_: Any, **__: Any) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


class MemoryTracker(LocalOperators):
    """A dispatch mode that counts the current and the peak bytes of each label."""

    def __init__(self, label: str, workspace: Callable[[Any, Any], int] | None = None) -> None:
        """Label by default with `label`, which `base` changes; `workspace` are the bytes that an
        operator's kernel takes and frees, by its arguments."""
        super().__init__()
        self.base, self._labels = label, list[str]()
        self._workspace = workspace
        self._total = self._peak_of_stretch = 0
        self.current: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.peak_bytes = 0  # the most that were alive at once; `peak` has them by label
        self.stretches: dict[str, int] = {}  # the most in each, by the name of `end_stretch`
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], str, int]] = {}

    def __enter__(self) -> "MemoryTracker":
        resize, tracker = torch.UntypedStorage.resize_, self

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            tracker._recount(storage)
            return result

        # FSDP2 frees what it gathered by resizing storages to 0, which no mode sees.
        self._stack.enter_context(
            mock.patch.object(torch.UntypedStorage, "resize_", resize_and_count)
        )
        return super().__enter__()

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        # What a ring receives is made by the operator itself.
        receives = func.namespace == "_c10d_functional"
        with self.labelled("communication") if receives else contextlib.nullcontext():
            for value in tree_iter(result):
                if isinstance(value, torch.Tensor):
                    self._count(value)
        if self._workspace is not None and (size := self._workspace(func, args)):
            self._change(self._label, size)
            self._change(self._label, -size)

    @property
    def _label(self) -> str:
        return self._labels[-1] if self._labels else self.base

    def start_over(self) -> None:
        """Forget the peak so far: the next is sought from what is alive now."""
        self.peak_bytes, self.peak = self._total, dict(self.current)
        self._peak_of_stretch = self._total
        self.stretches = {}

    def end_stretch(self, name: str) -> None:
        """Name what has run since the last stretch's end."""
        self.stretches[name] = max(self._peak_of_stretch, self.stretches.get(name, 0))
        self._peak_of_stretch = self._total

    @contextlib.contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Label storages that are made within the block."""
        self._labels.append(label)
        try:
            yield
        finally:
            self._labels.pop()

    def relabel(self, tensors: Iterable[torch.Tensor], label: str) -> None:
        """Give these tensors' storages this label from now on, and count those that are new."""
        for tensor in map(local_part, tensors):
            self._count(tensor)
            key = id(tensor.untyped_storage())
            if known := self._known.get(key):
                reference, before, size = known
                self._known[key] = reference, label, size
                self.current[before] -= size
                self.current[label] = self.current.get(label, 0) + size

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        label, size = self._label, storage.nbytes()
        reference = weakref.ref(storage, functools.partial(self._forget, key))
        self._known[key] = reference, label, size
        self._change(label, size)

    def _recount(self, storage: torch.UntypedStorage) -> None:
        if known := self._known.get(id(storage)):
            reference, label, before = known
            size = storage.nbytes()
            self._known[id(storage)] = reference, label, size
            self._change(label, size - before)

    def _forget(self, key: int, _: object) -> None:
        _, label, size = self._known.pop(key)
        self._change(label, -size)

    def _change(self, label: str, size: int) -> None:
        self.current[label] = self.current.get(label, 0) + size
        self._total += size
        if self._total > self.peak_bytes:
            self.peak_bytes, self.peak = self._total, dict(self.current)
        self._peak_of_stretch = max(self._peak_of_stretch, self._total)


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Any:
    """Patch a function of `owner` to run within the context manager `around(*its arguments)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def within(*args: Any, **kwargs: Any) -> Any:
        with around(*args, **kwargs):
            return original(*args, **kwargs)

    return mock.patch.object(owner, name, within)


@contextlib.contextmanager
def tracking(*, like_cuda: bool = True) -> Iterator[MemoryTracker]:
    """Enter a tracker that labels storages by `memory.CATEGORIES`; `like_cuda` counts the
    workspaces of CUDA's kernels too."""
    tracker = MemoryTracker("activations", _flash_workspace if like_cuda else None)

    def communicates(group: Any, *_: Any, **__: Any) -> Any:
        tracker.relabel(unsharded_gradients(group), "communication")
        return tracker.labelled("communication")

    fsdp_group = torch_private.fsdp_param_group()
    with contextlib.ExitStack() as stack:
        for name in ("unshard", "wait_for_unshard", "post_backward"):
            stack.enter_context(wrapped(fsdp_group, name, communicates))
        stack.callback(TRACKER.reset, TRACKER.set(tracker))
        yield stack.enter_context(tracker)


def _flash_workspace(operator: Any, args: Any) -> int:
    """Count what FlashAttention 2's backward takes on CUDA: dQ in fp32, a number a row, and dK and
    dV of every query head where heads share them. The CPU's kernel takes next to nothing.
    """
    _, backward = torch_private.attention_operators("cpu")
    if operator is not backward:
        return 0
    query, key = args[1], args[2]  # (B, heads, T, head_dim)
    shared = 0
    if query.shape[1] != key.shape[1]:
        expanded = key.numel() // key.shape[1] * query.shape[1]
        shared = 2 * expanded * key.element_size()
    return int(4 * query.numel() + 4 * query.numel() // query.shape[-1] + shared)
