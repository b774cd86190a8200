"""Scale-then-privatize beside DP-AdamW: the experiment's private run in one plain loop.

    python -m scripts.experiments.scaled --out FOLDER [--docs docs] [--only NAME…]

Needs FOLDER as `scripts/experiment.py --out FOLDER` begins it (starting weights, text), and writes
nothing there. Each run is a line of docs/results/scaled.json, and one that is there is not run
again; `--only` does those whose names begin so. `scaling.py` has the step.

Nothing here is private: keys come from debug seeds, so that runs of a seed have the same draws and
the same unit noise, and differ by what is compared. What is called epsilon is what a run with keys
of the operating system would spend. The text is public.
"""

import argparse
import dataclasses
import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.components.lr_scheduler import build_lr_schedulers

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import load_config
from torchtitan_dp.data.dataset import Records
from torchtitan_dp.data.samples.samples import IGNORE_INDEX, SampleStore
from torchtitan_dp.data.samples.tokenizer import load_tokenizer
from torchtitan_dp.models.llama3.adapter import HuggingFaceAdapter
from torchtitan_dp.models.llama3.model import Llama
from torchtitan_dp.models.parameters import trainable_parameters
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.sampling import poisson_draw

from .arms import Arm, private
from .evaluate import heldout_losses, load
from .runs import Folder, tuning_options
from .scaling import Geometry, ScaledMean


@dataclass(frozen=True)
class Run:
    """Describes one run: C, the seed, and `scaling.Geometry`'s settings; no `eps_s` is DP-AdamW."""

    eps_s: float | None = None
    max_grad_norm: float = 1.0
    subtract_noise: bool = False
    by_row: bool = False
    seed: int = 1

    @property
    def name(self) -> str:
        """Say all settings, so that a run with others has another name."""
        kind = "adamw" if self.eps_s is None else f"scaled-eps{self.eps_s:g}"
        kind += "-less-noise" if self.subtract_noise else ""
        kind += "-by-row" if self.by_row else ""
        return f"{kind}-C{self.max_grad_norm:g}-seed{self.seed}"

    def geometry(self, beta: float) -> Geometry | None:
        """Return how scales are made; None for DP-AdamW."""
        if self.eps_s is None:
            return None
        return Geometry(self.eps_s, beta, self.subtract_noise, self.by_row)

    @property
    def arm(self) -> Arm:
        """Return the trainer's run that has all other settings."""
        return dataclasses.replace(private(0), max_grad_norm=self.max_grad_norm, seed=self.seed)


# Ten on one seed; then, on others, DP-AdamW, the best, and one as good that scales more. The last
# is for the page: whether a smaller C makes a difference where every record is clipped.
RUNS = (
    Run(),
    *(Run(eps_s) for eps_s in (0.1, 1.0, 10.0)),
    *(Run(eps_s, subtract_noise=True) for eps_s in (0.1, 1.0)),
    *(Run(eps_s, subtract_noise=True, by_row=True) for eps_s in (0.1, 1.0)),
    *(Run(1.0, max_grad_norm=bound) for bound in (0.1, 10.0)),
    *(Run(eps_s, seed=seed) for seed in (2, 3) for eps_s in (None, 10.0, 1.0)),
    Run(max_grad_norm=0.1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the experiment's folder")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where results are told")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME")
    options = parser.parse_args()
    folder, target = Folder(options.out), results(options.docs)
    for run in RUNS:
        done = read(target)
        if run.name not in done and run.name.startswith(tuple(options.only)):
            done[run.name] = do(folder, run)
            write(target, done)
            print(f"{run.name}: held-out loss {done[run.name]['loss']:.4f}", flush=True)


def results(docs: Path) -> Path:
    return docs / "results" / "scaled.json"


def read(target: Path) -> dict[str, dict[str, Any]]:
    """Return the runs that are done, by name."""
    told = json.loads(target.read_text())["runs"] if target.exists() else []
    return {one["name"]: one for one in told}


def write(target: Path, done: dict[str, dict[str, Any]]) -> None:
    """Write a line a run, in the order of `RUNS`."""
    told = ({"name": r.name, "run": vars(r)} | done[r.name] for r in RUNS if r.name in done)
    lines = ",\n".join(map(json.dumps, told))
    target.write_text(f'{{"runs": [\n{lines}\n]}}\n', encoding="utf-8")


def do(folder: Folder, run: Run) -> dict[str, Any]:
    """Train and evaluate, as the trainer's runs are: by what is exported."""
    before = time.process_time()
    model, told = train(folder, run)
    told = {"cpu_seconds": round(time.process_time() - before, 1), **told}
    with tempfile.TemporaryDirectory() as name:
        weights = Path(name)
        for path in folder.base.glob("*.json"):  # the model's configuration, and its tokenizer
            shutil.copy2(path, weights)
        state = HuggingFaceAdapter(model.model_args, None).to_hf(model.state_dict())
        save_file({k: v.contiguous() for k, v in state.items()}, weights / "model.safetensors")
        return told | heldout_losses(weights, folder.corpus / "heldout")


def train(folder: Folder, run: Run) -> tuple[Llama, dict[str, Any]]:
    """Tune the starting weights; return them, and what was spent and clipped."""
    config = load_config(tuning_options(folder, run.arm, None), 1)
    records = Records.open("text", str(folder.corpus / "private"))
    samples = SampleStore(records.store, load_tokenizer(str(folder.base)), config.training.seq_len)
    privacy = spending(config, run.arm, len(records.train))
    model = load(folder.base).train()
    parameters = trainable_parameters(model)
    optimizer, schedule = adamw(config, list(parameters.values()))
    mean = ScaledMean(
        {name: parameter.shape for name, parameter in parameters.items()},
        run.geometry(config.optimizer.beta2),
        noise_std=privacy["noise_multiplier"] * run.max_grad_norm,
        max_grad_norm=run.max_grad_norm,
        batch=run.arm.batch,
    )
    keys = RootKey.from_debug_seed(run.seed)
    sampling_keys, noise_keys = keys.stream("sampling"), keys.stream("noise")
    clipped: list[bool] = []
    for step in range(1, run.arm.steps + 1):
        used_N = mean.scale_N
        draw = poisson_draw(sampling_keys.take(step), len(records.train), privacy["sample_rate"])
        for unit in records.train[draw]:
            optimizer.zero_grad()
            loss_of(model, *samples.sample(int(unit))).backward()
            parts = [p.grad.flatten() for p in parameters.values() if p.grad is not None]
            clipped.append(mean.add(torch.cat(parts)))
        for name, gradient in mean.take(noise_keys.take(step)).items():
            parameters[name].grad = gradient
        optimizer.step()
        schedule.step()
    told: dict[str, Any] = {"privacy": privacy, "clipped": round(sum(clipped) / len(clipped), 3)}
    if used_N is not None:  # how far the last step was from DP-AdamW's geometry
        quantiles = used_N.quantile(torch.tensor([0.01, 0.5, 0.99]))
        told["scales"] = [round(x, 3) for x in quantiles.tolist()]
    return model, told


def spending(config: JobConfig, arm: Arm, units: int) -> dict[str, float]:
    """Return sigma, found as the trainer finds it, with the terms that it rests on."""
    terms: dict[str, Any] = {"delta": config.privacy.delta, "sample_rate": arm.batch / units}
    rest: dict[str, Any] = {"steps": arm.steps, "accountant": config.privacy.accountant}
    sigma = accounting.noise_multiplier(target_epsilon=arm.epsilon, **terms, **rest)
    spent = accounting.epsilon(noise_multiplier=sigma, **terms, **rest)
    return {"epsilon": spent, "noise_multiplier": sigma, **terms}


def adamw(
    config: JobConfig, parameters: list[torch.nn.Parameter]
) -> tuple[torch.optim.Optimizer, Any]:
    """Make the trainer's optimizer, and its schedule of learning rates."""
    of = config.optimizer
    assert of.name == "AdamW"
    optimizer = torch.optim.AdamW(
        parameters,
        lr=of.lr,
        betas=(of.beta1, of.beta2),
        eps=of.eps,
        weight_decay=of.weight_decay,
        fused=of.implementation == "fused",
    )
    schedules = build_lr_schedulers([optimizer], config.lr_scheduler, config.training.steps)
    return optimizer, schedules


def loss_of(model: Llama, tokens_T: Tensor, labels_T: Tensor) -> Tensor:
    """Return a record's mean loss: of its targets, without the padding after them."""
    targets = (labels_T != IGNORE_INDEX).sum()
    length = max(int(targets), 1)
    losses_B: Tensor = model(
        tokens_T[None, :length], labels=labels_T[None, :length], targets=targets[None]
    )
    return losses_B.sum()


if __name__ == "__main__":
    main()
