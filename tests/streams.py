"""Streams that a CPU can have: their order is recorded, and what it leaves open is found.

`torch.cpu` has streams and events that do nothing, so that code can be written for any device.
`watched` puts recording ones in their place, FSDP2's among them. Each has a vector clock: how much
of every stream is done before what it does next. Operators run at once, as on CPU always; what is
checked is whether a device, which runs streams beside each other, would have to run them so:

- Two uses of a storage on different streams, one of which writes, are in order.
- A storage's users are done as its owner, the stream that it was allocated on, sees it, when it is
  freed: the caching allocator hands its memory to the owner at once, or unmaps it after waiting for
  the owner alone.

Both are asked of storages that the files under test allocate or use; FSDP2's own have other rules.
"""

import collections
import contextlib
import itertools
import sys
import weakref
from collections.abc import Iterator
from unittest import mock

import torch

import torchtitan_dp
from torchtitan_dp.plan.fake_step import LocalOperators

_PACKAGE = f"{torchtitan_dp.__path__[0]}/"
_numbers = itertools.count()


class Event:
    """What a stream had done when it was recorded."""

    def __init__(self, clock=None):
        self.clock = collections.Counter(clock)

    def record(self, stream=None):
        self.clock = collections.Counter((stream or torch.cpu.current_stream()).clock)

    def wait(self, stream=None):
        (stream or torch.cpu.current_stream()).wait_event(self)

    def query(self):
        return True

    def synchronize(self):
        raise AssertionError("the host waits for the device")


class Stream:
    def __init__(self, priority=-1):
        self.number, self.clock = next(_numbers), collections.Counter()

    def wait_event(self, event):
        self.clock |= event.clock  # the larger of each

    def wait_stream(self, stream):
        self.clock |= stream.clock

    def record_event(self, event=None):
        return Event(self.clock)

    def tick(self):
        self.clock[self.number] += 1
        return self.clock[self.number]

    def synchronize(self):
        raise AssertionError("the host waits for the device")


class _Storage:
    def __init__(self, owner, where):
        self.owner, self.where = owner, where
        self.uses = [(owner.number, owner.clock[owner.number], True, where)]


class Watch(LocalOperators):
    """A mode that lists in `found` what streams leave open."""

    def __init__(self, *files):
        super().__init__()
        self.files, self.found = files, []
        self.alive = {}
        self._references = {}

    def ran(self, func, args, kwargs, result):
        stream, where = torch.cpu.current_stream(), self._where()
        tick = stream.tick()
        outputs = [*_storages(result)]
        for value, writes in _arguments(func, args, kwargs):
            for storage in _storages(value):
                aliased = any(storage._cdata == other._cdata for other in outputs)
                if aliased and not writes and _is_view(func):
                    continue  # no kernel
                self._use(self._known(storage, stream, where), stream, tick, writes, where)
        for storage in outputs:
            self._known(storage, stream, where)

    def _known(self, storage, stream, where):
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = _Storage(stream, where)
            self._references[key] = weakref.ref(storage, lambda _: self._freed(key))
        return self.alive[key]

    def _use(self, known, stream, tick, writes, where):
        for number, when, wrote, there in known.uses:
            apart = number != stream.number and stream.clock[number] < when
            if apart and (writes or wrote) and self._is_ours(known.where, where, there):
                self.found.append(f"used at once: {where} on {stream.number}, {there} on {number}")
        known.uses.append((stream.number, tick, writes, where))

    def _freed(self, key):
        known = self.alive.pop(key)
        del self._references[key]
        for number, when, _, where in known.uses:
            if known.owner.clock[number] < when and self._is_ours(known.where, where):
                self.found.append(f"freed while in use: of {known.where}, by {where} on {number}")

    def _is_ours(self, *places):
        return any(place.startswith(self.files) for place in places)

    def _where(self):
        """The innermost function of this project, as `file:function`."""
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(_PACKAGE) and "/plan/fake_step.py" not in name:
                return f"{name.removeprefix(_PACKAGE)}:{frame.f_code.co_name}"
            frame = frame.f_back
        return "a test"


def _storages(value):
    for tensor in torch.utils._pytree.tree_leaves(value):
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            yield tensor.untyped_storage()


def _arguments(func, args, kwargs):
    """(value, whether it is written to); a collective may write to all it is given."""
    schema = func._schema
    collective = schema.name.startswith("c10d::")
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        yield value, collective or bool(alias is not None and alias.is_write)


def _is_view(func):
    return any(a.alias_info is not None for a in func._schema.arguments)


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """Give `torch.cpu` recording streams; the current one is a new one."""
    with (
        mock.patch.object(torch.cpu, "Stream", Stream),
        mock.patch.object(torch.cpu, "Event", Event),
        mock.patch.object(torch.cpu, "_current_stream", Stream()),
    ):
        yield


@contextlib.contextmanager
def watched(*files: str) -> Iterator[Watch]:
    """Record streams, and find what they leave open about these files of the package."""
    with streams(), Watch(*files) as watch:
        yield watch
