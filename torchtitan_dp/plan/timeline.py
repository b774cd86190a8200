"""What is alive in one block of the model, tensor by tensor, at the peak of each of its phases.

    python -m torchtitan_dp.plan.timeline N --job.config_file FILE [--section.key value …]

prints a Markdown table for rank 0 of N. The real step runs on fake tensors, as for the plan
(`fake_step`). A tensor is named after the module that makes it: the running one or, in backward,
the one whose call made the autograd node, found by the node's number. So nothing here depends on
the operations of a module.
"""

import functools
import sys
from collections import Counter
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from torchtitan_dp.config.load import exit_on_mistake, load_config
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.models.parameters import canonical_name
from torchtitan_dp.plan.fake_step import Step, fake_world
from torchtitan_dp.plan.labels import GATHERED, tracking_by
from torchtitan_dp.plan.memory import GIB
from torchtitan_dp.plan.tracker import MemoryTracker

FORWARD, RECOMPUTED = "forward", "recomputed forward"
FEED_FORWARD, ATTENTION = "feed-forward's backward", "attention's backward"
PHASES = (FORWARD, RECOMPUTED, FEED_FORWARD, ATTENTION)  # in the order of time
SMALL = 0.02  # of the peak: smaller rows are added up

# Code that allocates beside the model's, by the beginning of its module's name.
_CODE = {
    "torch.distributed.fsdp": "FSDP2",
    "torchtitan_dp.distributed.offload": "offload",
    "torchtitan_dp.distributed": "ring",
    "torch.distributed.tensor.experimental": "ring",
}
_CALLERS = ("torch.nn.modules.module", "torch.autograd.graph")  # what is further out only calls
_BY_PLACE = ("activations", "loss_head", "communication")  # labels; others say what a tensor is
_OPERATORS = {"mm": "product", "add": "sum", "clone": "copy", "wait_tensor": "received"}
_OPERATORS |= dict.fromkeys(("empty", "empty_like", "new_empty", "empty_strided"), "buffer")
_OPERATORS |= dict.fromkeys(("_to_copy", "to"), "cast") | {"zeros_like": "zeros"}
WORKSPACE = "workspace of the attention kernel"


class Row(NamedTuple):
    """Tensors that are added up: of one name, shape and dtype."""

    name: str
    shape: str
    dtype: str


@dataclass(frozen=True)
class Peak:
    """The moment of a phase when most bytes were alive."""

    bytes: int
    rows: Counter[Row]  # bytes


class Timeline(MemoryTracker):
    """Keeps, besides, where each live storage was made, and the peak of each phase."""

    def __init__(self, *args: Any, **terms: Any) -> None:
        super().__init__(*args, **terms)
        self._at_peak: dict[str, tuple[int, list[tuple[Row, str, int]]]] = {}
        self._phase: str | None = None
        self._operator = ""
        self._made: dict[int, Row] = {}  # by storage, as `_known`, and what has been freed
        self._running: list[tuple[str, int]] = []  # modules, and the number of their first node
        self._calls: list[tuple[range, str]] = []  # numbers of nodes, those of inner modules first
        self._place = "before the model"  # where the last storage was made
        self._block = -1
        self._heads: dict[torch.Size, str] = {}  # shapes of queries, keys and values

    def watch(self, model: nn.Module) -> None:
        """Follow the modules of a model, and the phases of its middle block."""
        self._block = len(model.layers) // 2  # type: ignore[arg-type]
        for name, module in model.named_modules():
            path = canonical_name(f"{name}.").rstrip(".")
            module.register_forward_pre_hook(functools.partial(self._enter, path), prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def peaks(self) -> dict[str, Peak]:
        """Return those of the phases that there were; a block that recomputes nothing has three."""
        found = {}
        for phase, (total, storages) in self._at_peak.items():
            rows: Counter[Row] = Counter()
            for row, label, size in storages:
                rows[row if label in _BY_PLACE else _of_label(label)] += size
            if rest := total - rows.total():
                rows[Row(WORKSPACE, "", "")] += rest
            found[phase] = Peak(total, rows)
        return {phase: found[phase] for phase in PHASES if phase in found}

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        self._operator = func.overloadpacket.__name__
        super().ran(func, args, kwargs, result)

    def _count(self, tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self._known:
            self._made[key] = self._row(tensor)
        super()._count(tensor)

    def _change(self, label: str, size: int) -> None:
        super()._change(label, size)
        if self._phase is not None and self._total > self._at_peak.get(self._phase, (-1,))[0]:
            self._look()

    def _look(self) -> None:
        assert self._phase is not None
        alive = [(self._made[key], label, size) for key, (_, label, size) in self._known.items()]
        self._at_peak[self._phase] = self._total, alive

    def _enter(self, path: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._running.append((path, torch.autograd._get_sequence_nr()))  # type: ignore[attr-defined]
        if path.endswith(".inner_attention") and len(inputs) > 1:
            self._heads = _like(*inputs[:2])
        if path == f"layers.{self._block}" and self._phase is None:
            inputs[0].register_hook(functools.partial(self._begin, None))
            self._begin(FORWARD)
        elif path == f"layers.{self._block}" and self._phase == FEED_FORWARD:
            self._begin(RECOMPUTED)

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        path, first = self._running.pop()
        last = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._calls.append((range(first, last), path))
        block = f"layers.{self._block}"
        if path == f"{block}.attention" and self._phase == FORWARD:
            output.register_hook(functools.partial(self._begin, ATTENTION))
        if path != block or block in (outer for outer, _ in self._running):
            return  # (what checkpoints a block has the block's own path)
        if self._phase == FORWARD:
            output.register_hook(functools.partial(self._begin, FEED_FORWARD))
            self._begin(None)
        elif self._phase == RECOMPUTED:
            self._begin(FEED_FORWARD)

    def _begin(self, phase: str | None, _: object = None) -> None:
        """Begin a phase, now or as a hook when a gradient is there."""
        self._phase = phase
        if phase is not None and self._total > self._at_peak.get(phase, (-1,))[0]:
            self._look()

    def _row(self, tensor: torch.Tensor) -> Row:
        place, backward = self._where()
        what = _OPERATORS.get(self._operator, self._operator)
        if "dot_product" in what:
            what = "attention kernel"
        if place == "ring":
            what += self._heads.get(tensor.shape, "")
        sizes = " × ".join(f"{size:,}" for size in tensor.shape) if tensor.dim() > 1 else "flat"
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Row(f"{place}: {what}{', backward' * backward}", sizes, dtype)

    def _where(self) -> tuple[str, bool]:
        """Return what is making a tensor, and whether for a gradient."""
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        backward = node is not None and not self._running
        frame: FrameType | None = sys._getframe()
        while frame is not None and (module := frame.f_globals["__name__"]) not in _CALLERS:
            for beginning, words in _CODE.items():
                if module.startswith(beginning):
                    return words, backward
            frame = frame.f_back
        if self._running:
            self._place = self._words(self._running[-1][0])
        elif node is not None:  # one that a function's own backward makes stays at the function
            number = node._sequence_nr()
            paths = (path for numbers, path in self._calls if number in numbers)
            self._place = next((self._words(path) for path in paths), self._place)
        return self._place, backward

    def _words(self, path: str) -> str:
        """Name a module, those of other blocks by their distance from the one that is watched."""
        if not path.startswith("layers."):
            return path or "model"
        _, number, *within = path.split(".", 2)
        away = int(number) - self._block
        return " ".join([f"block {away:+d}"] * (away != 0) + within) or "block"


def _like(query: torch.Tensor, key: torch.Tensor) -> dict[torch.Size, str]:
    """Return words for the shapes of queries and keys, (B, heads, T, F): in either layout of heads,
    and of keys and values together."""
    words = ("q", "k") if query.shape != key.shape else ("q, k", "q, k")
    found: dict[torch.Size, str] = {}
    for name, heads in zip(words, (query, key), strict=True):
        found |= dict.fromkeys((heads.shape, heads.transpose(1, 2).shape), f", like {name}")
    return found | {torch.Size((2, *key.shape)): ", like k and v"}


def _of_label(label: str) -> Row:
    return Row("FSDP2: gathered weights" if label == GATHERED else label.replace("_", " "), "", "")


def timeline(overrides: list[str], world_size: int) -> dict[str, Peak]:
    """Run one microbatch of a configuration, in a process that has no process group."""
    config = load_config(overrides, world_size)
    config.compile.enable = False
    with fake_world(world_size), tracking_by(Timeline) as tracker:
        step = Step(config, shape(config), tracker)
        step.update()
        step.free_gathered()
        tracker.watch(step.model)
        step.microbatch(config.training.seq_len)
        return tracker.peaks()


def markdown(peaks: dict[str, Peak]) -> str:
    """Write a table in GiB: the larger tensors, the rest, and all."""
    highest = max(peak.bytes for peak in peaks.values())
    most: Counter[Row] = Counter()
    for peak in peaks.values():
        most |= peak.rows
    listed = [row for row, size in most.most_common() if size >= SMALL * highest]
    lines = [["tensor", "shape", "dtype", *peaks], ["---"] * (3 + len(peaks))]
    for row in listed:
        sizes = [_gib(peak.rows[row]) for peak in peaks.values()]
        lines.append([row.name, row.shape, row.dtype, *sizes])
    rest = [peak.bytes - sum(peak.rows[row] for row in listed) for peak in peaks.values()]
    lines.append([f"all others, below {SMALL:.0%} of the peak", "", "", *map(_gib, rest)])
    lines.append(["**all**", "", "", *(f"**{_gib(peak.bytes)}**" for peak in peaks.values())])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size else ""


if __name__ == "__main__":
    with exit_on_mistake():
        print(markdown(timeline(sys.argv[2:], int(sys.argv[1]))), end="")
