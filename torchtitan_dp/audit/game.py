"""The distinguishing game: was a unit in the step or not, given only the noised gradient?

Each trial is one whole step at sampling rate 1, through the code that trains, up to the gradient
that AdamW gets; only the model is small, and its loss is linear, so that a case chooses each unit's
gradient. A case is a pair of batches that differ in one unit (docs/audit.md lists them). With
correlated noise a trial is a round of steps, the first with the batch and the others empty.

Guarantee:
    If steps are the claimed mechanism's, `Game.play` exceeds the claim with probability at most
    1 - confidence, over all cases together: exact norms make a step, or a round,
    1/sigma-Gaussian-DP, for estimated ones see `claimed_mu`. The claim fixes all
    thresholds before any trial.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.distributed import ParallelDims

from torchtitan_dp.config import Privacy
from torchtitan_dp.config.derived import METHODS
from torchtitan_dp.gradients.fsdp import ReductionGroups
from torchtitan_dp.gradients.layers import per_sample_layers
from torchtitan_dp.gradients.step import build_step
from torchtitan_dp.models.causal_lm.settings import LoRA
from torchtitan_dp.models.lora import add_adapters
from torchtitan_dp.models.parallelize import fsdp_mesh
from torchtitan_dp.models.parameters import copy_slice_, trainable_parameters
from torchtitan_dp.privacy.banded import NoiseChain
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.lower_bounds import claimed_mu, gaussian_mu
from torchtitan_dp.privacy.pld import gaussian_epsilon
from torchtitan_dp.privacy.sampling import deal
from torchtitan_dp.privacy.segments import Mechanism

CONFIDENCE = 0.999  # of all cases together: a correct step meets the claim exactly
_ROWS = 8  # of each parameter on each rank
_MOST_STEPS = 16  # of a trial, which show nearly all of the noise


@dataclass(frozen=True)
class Case:
    """Two batches of two units; gradients in multiples of C, (2 units, 2 parameters, N)."""

    name: str
    without_UPN: Tensor
    with_UPN: Tensor
    along_PN: Tensor  # the unit vector that the score is measured along
    threshold: float  # of the score: the guess is "with" from here on
    factors: tuple[float, float]  # with LoRA, a gradient's shares in B and in A: of norm 1


def cases(rows: int) -> list[Case]:
    """Make all cases, for two parameters of `rows` values each."""
    u = torch.full((2, rows), (2 * rows) ** -0.5)
    halves, parameters = u.clone(), u.clone()
    halves[:, rows // 2 :] *= -1
    parameters[1] *= -1
    none = torch.zeros_like(u)
    in_b, in_a, in_both = (1.0, 0.0), (0.0, 1.0), (0.5**0.5, -(0.5**0.5))

    def case(name: str, first: Tensor, unit: Tensor, *more: Any) -> Case:
        return Case(name, torch.stack([first, none]), torch.stack([first, unit]), *more)

    return [
        case("norm_C", none, u, u, 0.5, in_a),
        case("norm_100C", none, 100 * u, u, 0.5, in_b),
        case("neighbour", u, -10 * u, -u, -0.5, in_a),
        case("twin_halves", none, halves, halves, 0.5, in_both),
        case("twin_parameters", none, parameters, parameters, 0.5, in_both),
        case("not_a_number", u, u * torch.nan, -u, -0.5, in_both),
    ]


CONFIDENCE_OF_CASE = 1 - (1 - CONFIDENCE) / len(cases(2))


def sizes(privacy: Privacy, *, ranks: int, cp: int) -> tuple[int, int, int]:
    """Choose the fewest tokens of each rank, and rows and columns of a layer, at which the gradient
    method works as on a real model."""
    method = METHODS[privacy.gradient_method]
    tokens, rows, columns = method.smallest_layer(privacy)
    rows = max(_ROWS, -(-rows // ranks)) * ranks
    if method.estimates_norms:
        tokens, columns = max(tokens, rows), max(columns, rows)
    return -(-tokens // cp), rows, columns


class _Dials(nn.Module):
    """W = 2 parameters whose per-sample gradients, (2, N), are the model's input.

    They lie in the first columns: of rank one, which is the worst for an estimate of the norm.
    """

    dials: tuple[str, ...] = "first.weight", "second.weight"

    def __init__(self, tokens: int, rows: int, columns: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(columns, rows, bias=False) for _ in range(2))
        self._tokens, self._columns = tokens, columns

    def forward(self, gradient_BPN: Tensor) -> Tensor:
        x_BTD = gradient_BPN.new_zeros(len(gradient_BPN), self._tokens, self._columns)
        x_BTD[:, 0, 0] = 1.0
        outputs_BPTN = torch.stack([self.first(x_BTD), self.second(x_BTD)], dim=1)
        return (outputs_BPTN[:, :, 0] * gradient_BPN).sum((1, 2))

    def place(self, case: Case) -> Tensor:
        """Prepare for a case; return its direction in the parameters' first columns, (W, N)."""
        return case.along_PN


class _AdaptedDials(_Dials):
    """W = 4 parameters: the factors, each (N, N), of two adapted layers; 2 where A is frozen. Where
    A is p times the identity and B q times, the gradient of B is p times the input (times alpha /
    r), and that of A q times."""

    def __init__(self, tokens: int, rows: int, lora: LoRA) -> None:
        super().__init__(tokens, rows, rows)
        self._rows, self._lora = rows, lora
        layers = "first", "second"
        add_adapters(self, self, LoRA(rows, rows * lora.scaling, layers, lora.freeze_a))
        self._factors = [f"{name}.lora_{kind}.weight" for kind in "ba" for name in layers]
        self.dials = tuple(n for n in self._factors if self.get_parameter(n).requires_grad)

    def forward(self, gradient_BPN: Tensor) -> Tensor:
        return super().forward(gradient_BPN / self._lora.scaling)

    @torch.no_grad()
    def place(self, case: Case) -> Tensor:
        factors = (1.0, 0.0) if self._lora.freeze_a else case.factors
        for name, share in zip(self._factors, np.repeat(factors[::-1], 2), strict=True):
            factor = self.get_parameter(name)
            assert isinstance(factor, DTensor)  # a write to a gathered copy would be lost
            copy_slice_(factor, share * torch.eye(self._rows))
        return torch.cat([share * case.along_PN for share in factors])[: len(self.dials)]


class _Observer(torch.optim.Optimizer):
    """A stand-in for AdamW: this rank's parts of gradients' dot products with a direction."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], dials: tuple[str, ...], mesh: DeviceMesh
    ) -> None:
        super().__init__(list(parameters.values()), {})
        self._watched, self._mesh = [parameters[name] for name in dials], mesh
        self._along: list[Tensor] = []
        self.scores: list[Tensor] = []

    def restart(self, direction_WN: Tensor) -> None:
        """Score along another direction, of the parameters' first columns."""
        rank, ranks = self._mesh.get_local_rank(), self._mesh.size()
        self._along = [whole_N.chunk(ranks)[rank] for whole_N in direction_WN]
        self.scores = []

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        seen = torch.zeros(())
        for parameter, along in zip(self._watched, self._along, strict=True):
            seen = seen + (cast(DTensor, parameter.grad).to_local()[:, 0] * along).sum()
        self.scores.append(seen)


class Game:
    """A player of cases on a mesh, on the terms of a run."""

    def __init__(
        self,
        privacy: Privacy,
        mechanism: Mechanism,
        *,
        batch_size: int,
        degrees: tuple[int, int, int],
        root: RootKey,
        lora: LoRA | None = None,
    ) -> None:
        """Lay the model over `degrees` (dp_replicate, dp_shard, cp). Collective over the world.
        `mechanism` is the claim; `root`, the same on all ranks, is used up."""
        self._C, self._mechanism, self._batch_size = privacy.max_grad_norm, mechanism, batch_size
        self._noise_keys, self._norm_keys = root.stream("noise"), root.stream("projection")
        self._taken, self.steps = 0, min(mechanism.period, _MOST_STEPS)
        replicate, shard, self._cp = degrees
        self._dp, self._dp_rank = replicate * shard, dist.get_rank() // self._cp
        dims = ParallelDims(*degrees, 1, 1, 1, 1, dist.get_world_size())
        dims.build_mesh()
        self._mesh = mesh = fsdp_mesh(dims)
        self._device = torch.device(mesh.device_type)
        tokens, rows, columns = sizes(privacy, ranks=mesh.size(), cp=self._cp)
        self.cases = cases(rows)
        adapted = lora and _AdaptedDials(tokens, rows, lora)
        model = (adapted or _Dials(tokens, rows, columns)).to(self._device)
        if METHODS[privacy.gradient_method].per_sample_layers:
            per_sample_layers(model)
        module = fully_shard(model, mesh=mesh)  # as `models.parallelize`; one group, for speed
        if mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)
        if mesh.device_type == "cpu":  # gloo has no pre-multiplied sum
            module.set_force_sum_reduction_for_comms(True)
        parameters = trainable_parameters(model)
        groups = ReductionGroups.build(mesh.device_type, degrees)
        step = build_step(privacy, model, parameters, [module], groups, max_grad_norm=self._C)
        self._model, self._sum, self._gradients = model, step.clipped_sum, step.gradients
        self._observer = _Observer(parameters, model.dials, mesh)
        self._optimizer = step.optimizer(
            self._observer, noise_multiplier=mechanism.noise_of_step, expected_batch_size=1
        )

    def play_all(self, *, trials: int, delta: float) -> dict[str, Any]:
        """Play all cases, which have `CONFIDENCE` together; return the content of `--json`.

        Collective over the world; all ranks return the same.
        """
        each = CONFIDENCE_OF_CASE
        claimed = claimed_mu(self._mechanism, trials, each)
        found = {c.name: self.play(c, trials=trials, confidence=each) for c in self.cases}
        most = max(case["mu_lower_bound"] for case in found.values())
        return {
            "instrument": "game",
            "epsilon_lower_bound": gaussian_epsilon(most, delta),
            "epsilon_claimed": gaussian_epsilon(claimed, delta),
            "confidence": CONFIDENCE,
            "exceeds_claim": most > claimed,
            "delta": delta,
            "mu_lower_bound": most,
            "mu_claimed": claimed,
            "steps": self.steps,
            "trials": trials,
            "cases": found,
        }

    def play(self, case: Case, *, trials: int, confidence: float) -> dict[str, float]:
        """Guess in `trials` steps with the unit and in as many without; the confidence is of this
        case alone. Return the errors and the bound on mu that they prove.

        Collective over the world; all ranks return the same.
        """
        without = self.scores(case, case.without_UPN, trials)
        with_it = self.scores(case, case.with_UPN, trials)
        # A NaN score gives the unit away: it counts as "with".
        errors = {
            "false_positives": int((~(without < case.threshold)).sum()),
            "false_negatives": int((with_it < case.threshold).sum()),
        }
        mu = gaussian_mu(**errors, negatives=trials, positives=trials, confidence=confidence)
        return {"mu_lower_bound": mu, **errors}

    def scores(self, case: Case, batch_UPN: Tensor, trials: int) -> np.ndarray:
        """Take steps on one batch; return each noised gradient's dot product with the case's
        direction, over C: fp64 (trials,), the same on all ranks."""
        self._observer.restart(self._model.place(case).to(self._device))
        # The loss is the sum of the cp ranks' parts.
        units_UPN = (batch_UPN * (self._C / self._cp)).to(self._device)
        for _ in range(trials):
            chain = NoiseChain(self._noise_keys, self._mechanism.column)
            for step in range(self.steps):
                self._step(units_UPN if step == 0 else units_UPN[:0], chain)
        total = torch.stack(self._observer.scores).double() / self._C
        dist.all_reduce(total, group=self._mesh.get_group())
        return total.cpu().numpy().reshape(trials, self.steps) @ self._weights()

    def _step(self, units_UPN: Tensor, chain: NoiseChain) -> None:
        """Step as `DPTrainer.train_step` does: draw, deal out, clip, sum, and add noise."""
        self._taken += 1
        units, size = np.arange(len(units_UPN)), self._batch_size
        dealt = deal(units, ranks=self._dp, rank=self._dp_rank, batch_size=size)
        self._gradients.start_step(self._norm_keys.take(self._taken))
        for slots in dealt:
            at_once = self._gradients.batch_size or size
            for slot_B in torch.from_numpy(slots).to(self._device).split(at_once):
                valid_B = slot_B >= 0
                loss_B = self._model(units_UPN[slot_B].masked_fill(~valid_B[:, None, None], 0.0))
                self._gradients.accumulate_clipped(loss_B, valid_B, slot_B.tolist())
        self._optimizer.step(self._sum.take(), chain.take(self._taken))
        self._sum.reset()

    def _weights(self) -> np.ndarray:
        """Return the weights of a trial's steps in its score, for which noise is least: a unit in
        the first step adds the column c to C x, whose noise is white."""
        c = np.array(self._mechanism.column[: self.steps])
        return np.correlate(c, c, "full")[self.steps - 1 :] / (c @ c)
