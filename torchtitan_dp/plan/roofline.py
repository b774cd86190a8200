"""What a step is expected to take: microbatches, FLOPs, and on listed machines a time.

FLOPs are those of matrix products and of attention, as kernels compute them: a causal mask halves
attention, and flash attention computes the scores again in backward.

The time is a roofline, for machines that are not at hand; a start measures its own (`rehearsal`).
Each rank computes, reads memory and sends at one assumed share of public peaks. FSDP2's transfers
run beside kernels, and a ring's beside attention: the longer of each pair counts. Launches,
waiting, padding, validation, checkpoints and copies to the host are not in it.
`scripts/roofline.py --paper` prints its error.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn as nn

from torchtitan_dp.checkpoint.plan import expected_rounds
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import mesh_degrees, trains_one_sample
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.hugging_face import skeleton

RANKS_A_NODE = 8
BETWEEN = 50e9  # bytes a second of a rank's own link between nodes: 400 Gbit/s, NDR InfiniBand
PASSES, PASSES_OF_LOGITS = 200, 11
"""Values that a layer's elementwise kernels read and write, over tokens times width, and the loss
head's over tokens times vocabulary, as counted for Llamas (docs/benchmarks/counts.json)."""


@dataclass(frozen=True)
class Machine:
    """One device of a machine: peaks, and the share of each that a run is assumed to reach."""

    name: str
    flops: float  # a second, of dense bf16; of fp32, outside of tensor cores, a sixteenth
    memory: float  # bytes a second
    links: float  # bytes a second that a device sends to others of its node
    memory_gib: float
    share: float  # assumed

    def limits(self) -> str:
        return f"a roofline at {self.share:g} of public peaks (assumed); a start measures"


# Dense bf16, memory and NVLink (one way) of the makers' data sheets: NVIDIA A100 80GB SXM (2021),
# H100 SXM (2023), H200 SXM (2024), DGX B200 (2024). The share: FlashAttention-2, which PyTorch has,
# reaches 0.5 to 0.73 of A100's peak (Dao 2023, arXiv 2307.08691) and 0.35 of H100's (Shah et al.
# 2024, arXiv 2407.08608, figure 5), products more and small kernels less.
MACHINES = {
    machine.name: machine
    for machine in (
        Machine("a100", 312e12, 2.04e12, 300e9, 80, 0.5),
        Machine("h100", 989e12, 3.35e12, 450e9, 80, 0.4),
        Machine("h200", 989e12, 4.8e12, 450e9, 140, 0.4),
        Machine("b200", 2250e12, 8e12, 900e9, 180, 0.3),
    )
}


class Weights(NamedTuple):
    """Values of the matrices that every token is multiplied with."""

    trained: int
    all: int


class SampleFlops(NamedTuple):
    """The FLOPs of one sample's forward and backward pass, on all its ranks together."""

    products: float
    attention: float

    @property
    def total(self) -> float:
        return self.products + self.attention


@dataclass(frozen=True)
class StepCost:
    """The expected cost of one step, over the draw."""

    microbatches_per_step: float  # of each data-parallel rank
    tokens_per_step: float  # at most: with all padding to seq_len
    flops_per_step: float  # as computed, recomputation included
    flops_per_sample: float  # of all its windows
    attention_share: float  # of these
    recomputes: bool


@dataclass(frozen=True)
class StepSeconds:
    """The predicted seconds of a step, in all and by part; parts that overlap count whole."""

    total: float
    microbatch: float
    parts: dict[str, float]

    @property
    def limit(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])

    def hours(self, steps: int) -> float:
        return self.total * steps / 3600

    def for_programs(self, steps: int) -> dict[str, Any]:
        return {
            "seconds_per_step": self.total,
            "seconds_per_microbatch": self.microbatch,
            "hours": self.hours(steps),
            "seconds_by_part": self.parts,
        }


def step_cost(config: JobConfig, args: ModelArgs, *, records: int, rate: float) -> StepCost:
    """Work out the cost of a step that draws each of `records` with probability `rate`."""
    windows = config.data.windows_per_draw
    dp_replicate, dp_shard, _ = mesh_degrees(config)
    slots = dp_replicate * dp_shard * config.training.local_batch_size
    microbatches = expected_rounds(records, rate, slots)
    samples = microbatches * slots  # empty slots are computed too
    of_window = flops_of(config, args)
    sample = windows * of_window.total
    return StepCost(
        microbatches,
        samples * windows * config.training.seq_len,
        samples * sample,
        sample,
        of_window.attention / of_window.total,
        _recomputes(config),
    )


def step_seconds(
    config: JobConfig, args: ModelArgs, machine: Machine, microbatches: float
) -> StepSeconds:
    """Predict a step of so many `microbatches` of each data-parallel rank, of samples of
    `training.seq_len` tokens."""
    (replicate, shard, cp), training = mesh_degrees(config), config.training
    blocks, output = weights_of(args)
    values, trained = blocks.all + output.all, blocks.trained + output.trained
    of_sample, again = flops_of(config, args), 1 if _recomputes(config) else 0
    size = 2 if training.mixed_precision_param == "bfloat16" else 4
    peak = machine.share * machine.flops * (1 if size == 2 else 1 / 16)
    memory = machine.share * machine.memory
    tokens = training.seq_len / cp
    # A microbatch's samples one by one, or all at once.
    samples = training.local_batch_size
    passes = samples if trains_one_sample(config) else 1
    per_pass = samples / passes
    layers = PASSES * args.n_layers * args.dim * (3 + again) / 3
    # Norms are read once; the sum is read and written. Of several samples, each has a gradient.
    clipped = 16 * per_pass * trained / cp
    moved = size * per_pass * tokens * (layers + PASSES_OF_LOGITS * args.vocab_size) + clipped
    keys = 2 * args.n_kv_heads * args.head_dim * tokens * sum(not w for w in args.windows())
    around = (cp - 1) * size * (2 + again) + cp * 4  # forward, in backward, and fp32 gradients
    ring = per_pass * keys * around / _link(machine, cp, 1, in_turn=True) if cp > 1 else 0.0
    gathered = size * values * _others(shard * cp) / _link(machine, shard * cp, 1)
    reduced = 4 * per_pass * trained * _others(cp) / _link(machine, cp, 1)
    kept = config.parallelism.keep_weights_gathered
    parts = {
        "products": per_pass * of_sample.products / cp / peak,
        "attention": per_pass * of_sample.attention / cp / peak,
        "memory": moved / memory,
        "ring": ring,
        "weights and gradients": reduced + (0 if kept else 2 * gathered),
    }
    of_pass = max(
        parts["products"] + max(parts["attention"], ring) + parts["memory"],
        parts["weights and gradients"],
    )
    rounds = microbatches * config.data.windows_per_draw * passes
    # AdamW reads and writes weights and two moments, and reads the noised sum.
    update = 40 * trained / (shard * cp) / memory + kept * gathered
    sums = 4 * trained / cp * _others(shard) / _link(machine, shard, cp)
    sums += 8 * trained / (shard * cp) * _others(replicate) / _link(machine, replicate, shard * cp)
    by_part = {name: rounds * seconds for name, seconds in parts.items()}
    total = rounds * of_pass + update + sums
    return StepSeconds(total, of_pass * passes, by_part | {"update": update, "sums": sums})


def _others(ranks: int) -> float:
    """Return the share of a whole that one of so many ranks sends on."""
    return (ranks - 1) / ranks


def _link(machine: Machine, ranks: int, stride: int, *, in_turn: bool = False) -> float:
    """Return the bytes that a rank of a group sends in a second. Beyond a node each of its ranks
    has a link, which only collectives of all of them (not a ring `in_turn`) use at once."""
    if ranks * stride <= RANKS_A_NODE:
        return machine.share * machine.links
    abreast = 1 if in_turn else max(RANKS_A_NODE // stride, 1)
    return machine.share * min(machine.links, BETWEEN * abreast)


def flops_of(config: JobConfig, args: ModelArgs) -> SampleFlops:
    """Count the FLOPs of a sample of the configured length, with one backward pass.

    A product takes 2 FLOPs a value and token; in backward another 2 for the gradient of its input,
    and 2 for that of its weight, where that is trained. Attention takes two products of T x T / 2
    scores, and five in backward. All that blocks compute forward is computed once more if it is
    recomputed. Not counted are ghost norms, a second pass, and what `selective` checkpointing
    recomputes; what checkpointing and adapters of the first block spare is counted (less than a
    hundredth of a model of many layers).
    """
    blocks, output = weights_of(args)
    tokens, again = config.training.seq_len, 1 if _recomputes(config) else 0
    of_blocks = (4 + 2 * again) * blocks.all + 2 * blocks.trained
    of_output = 4 * output.all + 2 * output.trained
    # A window of w: w scores of each query but the first w.
    seen = (min(window or tokens, tokens) for window in args.windows())
    scores = sum(w * (tokens - w / 2) for w in seen)
    attention = 2 * args.n_heads * args.head_dim * scores * (2 * (1 + again) + 5)
    return SampleFlops(tokens * (of_blocks + of_output), attention)


def _recomputes(config: JobConfig) -> bool:
    return config.activation_checkpoint.mode == "full"


def weights_of(args: ModelArgs) -> tuple[Weights, Weights]:
    """Count the values of a model's matrices: of all blocks, and of the output layer. Embeddings
    are looked up, which takes no product; of experts a token takes some."""
    model = skeleton(args)
    shares = {2: 1.0, 3: args.share_of_experts}  # by dimensions; experts' biases have two as well

    def count(parameters: Iterable[tuple[str, nn.Parameter]]) -> Weights:
        matrices = [p for name, p in parameters if p.dim() in shares and not name.endswith("bias")]
        sizes = [(int(shares[p.dim()] * p.numel()), p.requires_grad) for p in matrices]
        trained = sum(size for size, is_trained in sizes if is_trained)
        return Weights(trained, sum(size for size, _ in sizes))

    return count(model.layers.named_parameters()), count([("weight", model.output.weight)])
