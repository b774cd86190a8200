"""The distinguishing game: with one step's noised gradient in hand, was a unit there or not?

Each trial is one whole step at sampling rate 1, through the code that trains: FSDP2's backward, the
gradient method, `ClippedSum`, its reductions and `DPOptimizer`, up to the gradient handed to AdamW.
Only the model is small: its loss is linear, so that a unit's gradient is whatever a case asks for.
A case is a pair of batches that differ in one unit, made to show one kind of fault:

| case | differs by | shows | with LoRA, in |
| --- | --- | --- | --- |
| `norm_C` | a gradient of norm C | noise that is missing or too small | A |
| `norm_100C` | one of norm 100 C | no clipping, or by a part of the norm | B |
| `neighbour` | -10 C u beside C u | clipping after samples are added | A |
| `twin_halves` | u on a parameter's half, -u on its other | noise repeated across shards | both |
| `twin_parameters` | u on one parameter, -u on its like | noise repeated across parameters | both |
| `not_a_number` | a gradient of NaN | a bad sample that tells of itself | both |

With `[lora]` the parameters are the factors A and B of two adapted layers. Each kind has cases of
its own for noise and for norms. In `twin_parameters` a factor has the opposite both of its like in
the other layer and of the other factor in its own, so that noise shared with either shows.

Guarantee:
    A step of the claimed mechanism is 1/sigma-Gaussian-DP for each case (with estimated norms, as
    `Mechanism.claimed_mu` says), so `Game.play` of it returns more than the claim with
    probability at most 1 - confidence, over all cases together (each has its share of the risk).
    Thresholds are fixed by the claim, before any trial.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from torchtitan_dp.config import Privacy
from torchtitan_dp.gradients.layers import per_sample_layers
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.gradients.randomized_norm import RandomizedNorms
from torchtitan_dp.gradients.reduction import ReductionGroups
from torchtitan_dp.gradients.step import build_step
from torchtitan_dp.models.lora import LoRA, add_adapters
from torchtitan_dp.models.parameters import copy_slice_, trainable_parameters
from torchtitan_dp.privacy.keys import KeyStream
from torchtitan_dp.privacy.lower_bounds import gaussian_mu
from torchtitan_dp.privacy.mechanism import Mechanism
from torchtitan_dp.privacy.sampling import deal

_ROWS = 8  # of each parameter on each rank


@dataclass(frozen=True)
class Case:
    """Holds two batches of two units, gradients in multiples of C, each (2, 2 parameters, N)."""

    name: str
    without_UPN: torch.Tensor
    with_UPN: torch.Tensor
    along_PN: torch.Tensor  # unit direction in which the difference is looked for
    threshold: float  # of the score; "with" is guessed on the far side, seen from `without`
    factors: tuple[float, float]  # with LoRA, how much of a gradient lies in B, in A: of norm 1


@dataclass(frozen=True)
class Outcome:
    """Holds what the guesses in one case prove."""

    case: str
    false_positives: int
    false_negatives: int
    mu: float  # lower bound


def cases(rows: int) -> list[Case]:
    """Make all cases, for two parameters of `rows` values each."""
    u = torch.full((2, rows), (2 * rows) ** -0.5)
    halves, parameters = u.clone(), u.clone()
    halves[:, rows // 2 :] *= -1
    parameters[1] *= -1
    none = torch.zeros_like(u)
    batch = torch.stack
    in_b, in_a, in_both = (1.0, 0.0), (0.0, 1.0), (0.5**0.5, -(0.5**0.5))
    return [
        Case("norm_C", batch([none, none]), batch([none, u]), u, 0.5, in_a),
        Case("norm_100C", batch([none, none]), batch([none, 100 * u]), u, 0.5, in_b),
        Case("neighbour", batch([u, none]), batch([u, -10 * u]), -u, -0.5, in_a),
        *(
            Case(name, batch([none, none]), batch([none, twins]), twins, 0.5, in_both)
            for name, twins in (("twin_halves", halves), ("twin_parameters", parameters))
        ),
        Case("not_a_number", batch([u, none]), batch([u, u * torch.nan]), -u, -0.5, in_both),
    ]


def sizes(privacy: Privacy, *, ranks: int, cp: int) -> tuple[int, int, int]:
    """Choose how many tokens each rank has, and how many rows and columns a layer, on `ranks`.

    They are as few as the gradient method does with what it does with a model's. Where it estimates
    norms, of matrices that are not too far from square, all three grow with the mesh.
    """
    method = METHODS[privacy.gradient_method]
    tokens, rows, columns = method.smallest_layer(privacy)
    rows = max(_ROWS, -(-rows // ranks)) * ranks
    if method.estimates_norms:
        tokens, columns = max(tokens, rows), max(columns, rows)
        norms = RandomizedNorms(privacy.projections, privacy.norm_estimator, None, capped=True)
        assert norms.estimates(tokens, torch.Size((rows, columns)))
    return -(-tokens // cp), rows, columns


class _Dials(nn.Module):
    """Has W = 2 parameters whose gradient, for sample b, is whatever (2, N) the loss is asked for:
    in their first column, of rank one, which is the worst for an estimate of its norm."""

    dials: tuple[str, ...] = "first.weight", "second.weight"

    def __init__(self, tokens: int, rows: int, columns: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(columns, rows, bias=False) for _ in range(2))
        self._tokens, self._columns = tokens, columns

    def forward(self, gradient_BPN: torch.Tensor) -> torch.Tensor:
        x_BTD = gradient_BPN.new_zeros(len(gradient_BPN), self._tokens, self._columns)
        x_BTD[:, 0, 0] = 1.0
        outputs_BPTN = torch.stack([self.first(x_BTD), self.second(x_BTD)], dim=1)
        return (outputs_BPTN[:, :, 0] * gradient_BPN).sum((1, 2))

    def place(self, case: Case) -> torch.Tensor:
        """Prepare for a case, and return its direction in the parameters' first columns: (W, N)."""
        return case.along_PN


class _AdaptedDials(_Dials):
    """Has for parameters the W = 4 factors of two layers, each (N, N), all of them watched.

    With z = x A^T, the gradient of B is g^T z, and that of A is (g B)^T x, each times alpha / r. So
    where A is p times the identity and B q times, B gets p times what the loss is asked for, and A
    q times.
    """

    dials = tuple(f"{name}.lora_{kind}.weight" for kind in "ba" for name in ("first", "second"))

    def __init__(self, tokens: int, rows: int, lora: LoRA) -> None:
        super().__init__(tokens, rows, rows)
        self._rows, self._scaling = rows, lora.scaling
        add_adapters(self, self, LoRA(rows, rows * lora.scaling, ("first", "second")))

    def forward(self, gradient_BPN: torch.Tensor) -> torch.Tensor:
        return super().forward(gradient_BPN / self._scaling)

    @torch.no_grad()
    def place(self, case: Case) -> torch.Tensor:
        for name, share in zip(self.dials, np.repeat(case.factors[::-1], 2), strict=True):
            factor = self.get_parameter(name)
            assert isinstance(factor, DTensor)  # what is gathered would be thrown away
            copy_slice_(factor, share * torch.eye(self._rows))
        return torch.cat([share * case.along_PN for share in case.factors])


class _Observer(torch.optim.Optimizer):
    """Keeps, in AdamW's place, how far the gradient it is handed lies along a direction."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], watched: list[nn.Parameter], mesh: DeviceMesh
    ) -> None:
        """
        Args:
            parameters: all that are trained.
            watched: those of them that a direction is of.
        """
        super().__init__(list(parameters.values()), {})
        self._watched, self._mesh = watched, mesh
        self._along: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []

    def look_along(self, direction_WN: torch.Tensor) -> None:
        rank, ranks = self._mesh.get_local_rank(), self._mesh.size()
        self._along = [whole_N.chunk(ranks)[rank] for whole_N in direction_WN]  # first columns
        self.scores = []

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        seen = torch.zeros(())
        for parameter, along in zip(self._watched, self._along, strict=True):
            seen = seen + (cast(DTensor, parameter.grad).to_local()[:, 0] * along).sum()
        self.scores.append(seen)


class Game:
    """Plays cases on a mesh, on terms that a run could have."""

    def __init__(
        self,
        privacy: Privacy,
        *,
        mechanism: Mechanism,
        batch_size: int,
        degrees: tuple[int, int, int],
        mesh: DeviceMesh,
        noise_keys: KeyStream,
        projection_keys: KeyStream,
        lora: LoRA | None = None,
    ) -> None:
        """
        Args:
            privacy: C, the clip function, the gradient method, and how is summed and noised.
            mechanism: the claim, with noise.
            batch_size: MBS.
            degrees: dp_replicate, dp_shard, cp.
            mesh: of dp_shard x cp, also of one rank.
            noise_keys, projection_keys: the same on all ranks, not used yet.
            lora: whether adapters are trained; of its sizes only alpha / r matters here.

        Collective over the world.
        """
        self._C, self._mechanism, self._batch_size = privacy.max_grad_norm, mechanism, batch_size
        self._keys, self._projection_keys, self._trial = noise_keys, projection_keys, 0
        method = METHODS[privacy.gradient_method]
        replicate, shard, self._cp = degrees
        self._dp, self._dp_rank = replicate * shard, dist.get_rank() // self._cp
        self._mesh = mesh
        tokens, rows, columns = sizes(privacy, ranks=mesh.size(), cp=self._cp)
        self.cases = cases(rows)
        self._device = torch.device(mesh.device_type)
        model = _Dials(tokens, rows, columns)
        if lora is not None:
            model = _AdaptedDials(tokens, rows, lora)
        model.to(self._device)
        if method.per_sample_layers:
            per_sample_layers(model)
        module = _shard(model, mesh)
        parameters = trainable_parameters(model)
        groups = ReductionGroups.build(mesh.device_type, degrees)
        step = build_step(privacy, model, parameters, [module], groups, max_grad_norm=self._C)
        self._model, self._sum, self._gradients = model, step.clipped_sum, step.gradients
        dials = [parameters[name] for name in model.dials]
        self._observer = _Observer(parameters, dials, mesh)
        self._optimizer = step.optimizer(
            self._observer, noise_multiplier=mechanism.noise_multiplier, expected_batch_size=1
        )

    def claim(self, *, trials: int, confidence: float) -> float:
        """Return the mu that `play` with these arguments must not exceed."""
        return self._mechanism.claimed_mu(trials=trials, confidence=confidence)

    def play(self, case: Case, *, trials: int, confidence: float) -> Outcome:
        """Guess in `trials` steps with the unit and as many without.

        Args:
            confidence: of this case alone; for several, give each its share of the risk.

        Collective over the world; all ranks return the same.
        """
        without = self.scores(case, case.without_UPN, trials)
        with_it = self.scores(case, case.with_UPN, trials)
        # A score that is no number gives the unit away: it counts as "with".
        false_positives = int((~(without < case.threshold)).sum())
        false_negatives = int((with_it < case.threshold).sum())
        mu = gaussian_mu(
            false_positives=false_positives,
            negatives=trials,
            false_negatives=false_negatives,
            positives=trials,
            confidence=confidence,
        )
        return Outcome(case.name, false_positives, false_negatives, mu)

    def scores(self, case: Case, batch_UPN: torch.Tensor, trials: int) -> np.ndarray:
        """Take steps on one batch, and tell how far each noised gradient lies along the case's
        direction, over C.

        Returns:
            fp64 (trials,), the same on all ranks.
        """
        self._observer.look_along(self._model.place(case).to(self._device))
        # Each cp rank has a part of the tokens, hence of the loss.
        units_UPN = (batch_UPN * (self._C / self._cp)).to(self._device)
        for _ in range(trials):
            self._trial += 1
            self._step(units_UPN)
        total = torch.stack(self._observer.scores).double() / self._C
        dist.all_reduce(total, group=self._mesh.get_group())
        return total.cpu().numpy()

    def _step(self, units_UPN: torch.Tensor) -> None:
        """Step as `DPTrainer.train_step` does: draw, deal out, clip, sum, and add noise."""
        dealt = deal(
            np.arange(len(units_UPN)),
            ranks=self._dp,
            rank=self._dp_rank,
            batch_size=self._batch_size,
        )
        at_once = self._gradients.batch_size or self._batch_size
        self._gradients.start_step(self._projection_keys.take(self._trial))
        for slots in dealt:
            for slot_B in torch.from_numpy(slots).to(self._device).split(at_once):
                valid_B = slot_B >= 0
                unit_BPN = units_UPN[slot_B].masked_fill(~valid_B[:, None, None], 0.0)
                loss_B = self._model(unit_BPN)
                self._gradients.accumulate_clipped(loss_B, valid_B, slot_B.tolist())
        self._optimizer.step(self._sum.take(), self._keys.take(self._trial))
        self._sum.reset()


def _shard(model: _Dials, mesh: DeviceMesh) -> FSDPModule:
    """Lay the model over `mesh` as `models.llama3.parallelize` does, in one group, to be quick."""
    module = fully_shard(model, mesh=mesh)
    if mesh.size() > 1:
        module.set_gradient_divide_factor(1.0)
    if mesh.device_type == "cpu":  # gloo has no pre-multiplied sum
        module.set_force_sum_reduction_for_comms(True)
    return module
