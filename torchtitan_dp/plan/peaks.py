"""Peak memory by sequence length, of the full model or extrapolated from a few layers.

Layers are alike, so what is alive in a stretch of the step (the loss head's, the last block's
backward, the first one's) grows by the same bytes with each, and so it does with each token: two
models of few layers, at two lengths, determine any. The peak is that of the highest stretch, which
need not be the highest of few layers or tokens. Where layers with and without a window alternate,
few layers begin and end as all do. Lengths whose estimate is close to the limit, short ones (below
`LONG`), and those beyond a window that no line has seen, are predicted with all layers.
"""

import contextlib
import copy
import gc
import math
from collections.abc import Callable
from typing import NamedTuple

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import mesh_degrees
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.plan.fake_step import Step, fake_world
from torchtitan_dp.plan.memory import communicators, limit_bytes
from torchtitan_dp.plan.tracker import MemoryTracker, tracking
from torchtitan_dp.plan.work import Counting, StepWork, Work

FEW_LAYERS = (4, 5)  # so that each stretch of a deeper model is there (`fake_step`)
LONG = 4096  # tokens per rank, from which few layers suffice
CLOSE = 0.03  # of the limit: nearer to it, an extrapolation does not decide


class Microbatch(NamedTuple):
    """The predicted memory of a microbatch."""

    peak: tuple[int, dict[str, int]]  # bytes, in all and by category
    stretches: dict[str, int]  # the peak bytes of each
    work: Work  # none where it is not counted


MakeStep = Callable[[JobConfig, ModelArgs, MemoryTracker], Step]


class Model:
    """Predicts the peaks of a model that is built once, for samples of any length."""

    def __init__(
        self,
        config: JobConfig,
        args: ModelArgs,
        mode: str,
        make: MakeStep = Step,
        counting: Counting | None = None,
    ) -> None:
        """Build a step with this mode of activation checkpointing, and predict its update;
        `counting` also counts the work of both."""
        config = copy.deepcopy(config)
        config.activation_checkpoint.mode = mode
        self._stack = contextlib.ExitStack()
        self._counting = counting
        self._tracker = self._stack.enter_context(tracking(counts=self._counting))
        self._step = make(config, args, self._tracker)
        self._tracker.start_over()
        self._take_work()
        self._step.update()
        self._update_work = self._take_work()
        self.update = self._tracker.peak_bytes, dict(self._tracker.peak)
        self._known: dict[int, Microbatch] = {}

    def microbatch(self, seq_len: int) -> Microbatch:
        """Predict a microbatch after the first update, which is the first of its step."""
        if seq_len not in self._known:
            self._step.free_gathered()
            tracker = self._tracker
            tracker.start_over()
            self._take_work()
            self._step.microbatch(seq_len)
            self._known[seq_len] = Microbatch(
                (tracker.peak_bytes, dict(tracker.peak)),
                tracker.stretches,
                self._take_work(),
            )
        return self._known[seq_len]

    def stretches(self, seq_len: int) -> dict[str, int]:
        """Predict the peak bytes of each stretch of a microbatch, and of the update."""
        return self.microbatch(seq_len).stretches | {"update": self.update[0]}

    def at(self, seq_len: int) -> tuple[int, dict[str, int]]:
        """Predict the peak of microbatch and update, in all and by category."""
        return max(self.update, self.microbatch(seq_len).peak, key=lambda found: found[0])

    @property
    def host_bytes(self) -> int:
        """The host's page-locked memory for the longest sample so far."""
        return self._step.host_bytes

    def _take_work(self) -> Work:
        return self._counting.take() if self._counting else Work(float)

    def work(self, seq_len: int) -> StepWork:
        """Return what a microbatch, the first of its step, and an update do."""
        microbatch = self.microbatch(seq_len).work
        return StepWork(microbatch, self._update_work, self._step.trained_values)

    def close(self) -> None:
        """Free it: one model is tracked at a time."""
        self._stack.close()
        del self._step, self._tracker
        gc.collect()


def step_of(
    config: JobConfig, args: ModelArgs, counting: Counting | None = None
) -> tuple[float, StepWork]:
    """Predict the peak bytes of a step on samples of `training.seq_len`, and count its work, from
    few layers where those stand for all; in a fake world."""
    config, seq_len = copy.deepcopy(config), config.training.seq_len
    config.compile.enable = False  # fused kernels need less, how much less is not predicted
    layers, mode = few_layers(args), config.activation_checkpoint.mode
    if args.n_layers <= layers[1] or mode not in ("none", "full"):  # others are no line in layers
        layers = (args.n_layers,) * 2
    found = []
    for n_layers in dict.fromkeys(layers):
        few = copy.deepcopy(args)
        few.n_layers = n_layers
        model = Model(config, few, mode, counting=counting)
        found.append((model.stretches(seq_len), model.work(seq_len)))
        model.close()
    (stretches, work), (more_stretches, more_work) = found[0], found[-1]
    if len(found) == 1:
        return max(stretches.values()), work
    both = stretches.keys() & more_stretches.keys()
    pairs = ((stretches[name], more_stretches[name]) for name in both)
    peak = max(of_layers(args.n_layers, *pair, layers) for pair in pairs)
    return peak, work.with_layers(more_work, layers, args.n_layers)


def fits(config: JobConfig, args: ModelArgs, world_size: int, memory_gib: float) -> bool:
    """Return whether a rank of a fake world of its own fits in a device's memory."""
    with fake_world(world_size):
        peak, _ = step_of(config, args)
    return peak <= limit_bytes(memory_gib, communicators(mesh_degrees(config)))


class Whole:
    """Peaks in bytes, by length, predicted with all layers."""

    def __init__(self, config: JobConfig, args: ModelArgs, mode: str) -> None:
        self.config, self.args, self.mode = config, args, mode
        self.known: dict[int, float] = {}
        self._update: float | None = None

    def update(self) -> float:
        """Return the peak of an update, after any estimate; no sample's length changes it."""
        assert self._update is not None, "nothing has been predicted"
        return self._update

    def estimate(self, *lengths: int) -> list[float]:
        """Return the peaks, or close estimates of them."""
        if wanted := [length for length in lengths if length not in self.known]:
            model = Model(self.config, self.args, self.mode)
            self._update = model.update[0]
            self.known |= {length: model.at(length)[0] for length in wanted}
            model.close()
        return [self.known[length] for length in lengths]

    def decide(self, seq_len: int) -> float:
        """Return the peak, estimated only where it is far from the limit."""
        return self.estimate(seq_len)[0]


class Extrapolated:
    """The same from few layers and two lengths; lengths close to the limit with all layers."""

    def __init__(self, whole: Whole, limit: int, unit: int) -> None:
        self._whole, self._limit = whole, limit
        self.short = LONG * whole.config.parallelism.context_parallel_degree
        self._lengths = two_lengths(unit)
        self._layers = few_layers(whole.args)
        self._corners: dict[str, tuple[list[int], ...]] = {}

    def update(self) -> float:
        return self._at(self._lengths[0], *self._corners["update"])

    def estimate(self, *lengths: int) -> list[float]:
        if not self._corners:
            few, more = map(self._stretches, self._layers)
            both = few[0].keys() & more[0].keys()
            self._corners = {
                name: tuple([found[name] for found in layers] for layers in (few, more))
                for name in both
            }
        return [
            max(self._at(length, *found) for found in self._corners.values()) for length in lengths
        ]

    def _stretches(self, layers: int) -> list[dict[str, int]]:
        """Predict what each stretch of a step takes with so many layers, at both lengths."""
        args = copy.deepcopy(self._whole.args)
        args.n_layers = layers
        model = Model(self._whole.config, args, self._whole.mode)
        found = [model.stretches(length) for length in self._lengths]
        model.close()
        return found

    def _at(self, seq_len: int, few: list[int], more: list[int]) -> float:
        """Draw lines through a stretch's bytes: over layers, then over lengths."""
        n_layers = self._whole.args.n_layers
        of_all = [of_layers(n_layers, *pair, self._layers) for pair in zip(few, more, strict=True)]
        start, end = self._lengths
        return of_all[0] + (of_all[1] - of_all[0]) * (seq_len - start) / (end - start)

    def decide(self, seq_len: int) -> float:
        bends = any(self._lengths[0] < window < seq_len for window in _windows(self._whole.args))
        if seq_len < self.short or bends:
            return self._whole.decide(seq_len)
        (guess,) = self.estimate(seq_len)
        close = abs(guess - self._limit) <= CLOSE * self._limit
        return self._whole.decide(seq_len) if close else guess


Peaks = Whole | Extrapolated


def few_layers(args: ModelArgs) -> tuple[int, int]:
    """Return how many of the first layers stand for all: two numbers, a period of the layers'
    windows apart, whose layers end as all do, and have each kind among those between."""
    windows, n_layers, few = _windows(args), args.n_layers, FEW_LAYERS[0]
    period = next(p for p in range(1, n_layers + 1) if windows[p:] == windows[: n_layers - p])
    few += (n_layers - few) % period + (period if period > 1 else 0)
    return few, few + period


def _windows(args: ModelArgs) -> list[float]:
    """List the tokens that each layer attends to."""
    return [math.inf if window is None else window for window in args.windows()]


def of_layers(
    n_layers: int, few: float, more: float, layers: tuple[int, int] = FEW_LAYERS
) -> float:
    """Draw a line through what two numbers of layers take, and read it at `n_layers`."""
    share = (n_layers - layers[0]) / (layers[1] - layers[0])
    return few + share * (more - few)


def shortest(config: JobConfig) -> int:
    """Return the length that divides all others, since cp cuts one into two parts a rank."""
    return 2 * config.parallelism.context_parallel_degree


def two_lengths(unit: int) -> tuple[int, int]:
    """Return the two lengths to extrapolate from."""
    return unit * 2**13, unit * 2**14
