"""One run: the trainer's own command, held-out losses of what it exports, and their JSON.

A run that has a JSON is done; its weights are removed, so that a folder stays small.
"""

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import corpus, model_files
from .arms import ALPHA, Arm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TINY = 1e-4  # the bound C of noise alone: gradients hold next to nothing
PRE_TRAINING = "public"


class Folder:
    """Names what lies where in the experiment's folder."""

    def __init__(self, out: Path) -> None:
        self.out = out.resolve()
        self.corpus, self.shape = self.out / "corpus", self.out / "shape"
        self.base = self.out / "base"  # the weights that all tuning starts from

    def run(self, name: str) -> Path:
        return self.out / "runs" / name

    def told(self, name: str) -> Path:
        return self.out / "results" / f"{name}.json"


def prepare(folder: Folder) -> None:
    """Make the corpus and the tokenizer, and pre-train; what is there already is kept."""
    corpus.build(folder.corpus)
    model_files.write(folder.shape, folder.corpus / "public.jsonl")
    if (folder.base / "model.safetensors").exists():
        return
    train(pre_training_options(folder))
    # The weights alone: the export's privacy.json says "not private", which is right of a run
    # without privacy and would count for every run that starts from it. These saw public text only.
    folder.base.mkdir(parents=True, exist_ok=True)
    exported = folder.run(PRE_TRAINING) / "hf"
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    for name in names:
        shutil.copy2(exported / name, folder.base / name)


def do(folder: Folder, arm: Arm) -> dict[str, Any]:
    """Run an arm, unless it has been; its numbers."""
    path = folder.told(arm.name)
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    told: dict[str, Any] = {"name": arm.name, "arm": vars(arm) | {"batch": arm.batch}}
    weights = folder.base
    if arm.kind != "none":
        shutil.rmtree(folder.run(arm.name), ignore_errors=True)  # of a run that was cut off
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        options = tuning_options(folder, arm, noise_of(folder, arm))
        train(options)
        told["cpu_seconds"] = round(
            resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, 1
        )
        told["options"] = " ".join(options).replace(f"{folder.out}/", "").replace(f"{ROOT}/", "")
        weights = folder.run(arm.name) / "hf"
        if arm.kind != "plain":
            told["privacy"] = privacy_of(folder.run(arm.name), arm)
    from .evaluate import heldout_losses  # PyTorch, while nothing else computes

    told |= heldout_losses(weights, folder.corpus / "heldout")
    if arm.ema:
        last = release_last_weights(folder.run(arm.name))
        told["last_weights"] = heldout_losses(last, folder.corpus / "heldout")["loss"]
        shutil.rmtree(last)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(told, indent=1) + "\n")
    partial.rename(path)
    if arm.kind != "none":
        shutil.rmtree(folder.run(arm.name))
    return told


def train(options: list[str]) -> None:
    """Run the trainer in one process of its own, as torchrun would start it."""
    _python("-m", "torchtitan_dp.train", *options)


def release_last_weights(run: Path) -> Path:
    """Return a folder with the weights after the last step of a run that exported an average."""
    target = run.with_name(f"{run.name}.last")  # a release may not lie in its run
    shutil.rmtree(target, ignore_errors=True)
    _python("-m", "torchtitan_dp.release", str(run), str(target), "--no-ema")
    return target


def _python(*arguments: str) -> None:
    """Run a command of the package in a process of its own, which is all of its mesh."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    environment = {**os.environ, **alone, **place, "PYTHONPATH": str(ROOT)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def pre_training_options(folder: Folder) -> list[str]:
    return _options(
        {
            "job.config_file": HERE / "public.toml",
            "job.dump_folder": folder.run(PRE_TRAINING),
            "training.dataset_path": folder.corpus / "public.jsonl",
            "model.hf_assets_path": folder.shape,
        }
    )


def tuning_options(folder: Folder, arm: Arm, noise: float | None) -> list[str]:
    """Return the options of the trainer that make an arm.

    Args:
        noise: sigma of the private run that noise alone is compared with.
    """
    values: dict[str, object] = {
        "job.config_file": HERE / "private.toml",
        "job.dump_folder": folder.run(arm.name),
        "training.dataset_path": folder.corpus / "private",
        "model.hf_assets_path": folder.base,
        "training.steps": arm.steps,
        "training.global_batch_size": arm.batch,
        "optimizer.lr": arm.lr,
        "debug.seed": arm.seed,
    }
    if arm.rank:
        values |= {"lora.rank": arm.rank, "lora.alpha": ALPHA}
    if arm.kind == "plain":
        values |= {"privacy.no-enable": None, "training.local_batch_size": min(4, arm.batch)}
        return _options(values)
    if arm.kind == "noise":
        assert noise is not None
        values |= {
            "privacy.noise_multiplier": noise * arm.max_grad_norm / TINY,
            "privacy.max_grad_norm": TINY,
        }
    else:
        values |= {
            "privacy.target_epsilon": arm.epsilon,
            "privacy.max_grad_norm": arm.max_grad_norm,
        }
    if arm.bands > 1:
        values |= {"privacy.noise": "banded", "privacy.bands": arm.bands}
    if arm.optimizer != "AdamW":
        values["optimizer.name"] = arm.optimizer
    if arm.ema:
        values["ema.enable"] = None
    if arm.windows:
        values |= {"data.windows_per_draw": arm.windows, "data.long_records": "window"}
    return _options(values)


def _options(values: dict[str, object]) -> list[str]:
    pairs = ([f"--{key}"] + ([] if v is None else [str(v)]) for key, v in values.items())
    return [word for pair in pairs for word in pair]


def noise_of(folder: Folder, arm: Arm) -> float | None:
    """Return sigma of the private run that an arm of noise alone takes its noise from."""
    if arm.kind != "noise":
        return None
    twin = folder.told(dataclasses.replace(arm, kind="private").name)
    if not twin.exists():
        raise ValueError(f"{arm.name}: run {twin.stem} first, whose noise it has")
    return float(json.loads(twin.read_text())["privacy"]["noise_multiplier"])


def privacy_of(run: Path, arm: Arm) -> dict[str, Any]:
    """Return what a private run spent, and how large its noise was beside a gradient of norm C."""
    from torchtitan_dp.config.load import read_config
    from torchtitan_dp.models.families import trained_count
    from torchtitan_dp.models.hugging_face import shape
    from torchtitan_dp.plan.signal import noise_of
    from torchtitan_dp.privacy.banded import noise_in_step, noise_in_sum

    said = json.loads((run / "privacy.json").read_text())
    trained = trained_count(shape(read_config(str(run))))
    told: dict[str, Any] = {"trained_parameters": trained}
    sigma = said["noise_multiplier"]
    told |= {k: said[k] for k in ("epsilon", "delta", "noise_multiplier", "sample_rate")}
    if arm.kind == "noise":  # its epsilon is that of gradients which hold next to nothing
        sigma *= TINY / arm.max_grad_norm
    noise = noise_of(noise_multiplier=sigma, trained=trained, batch=arm.batch, steps=arm.steps)
    in_step, in_sum = noise_in_step(arm.bands, arm.steps), noise_in_sum(arm.bands, arm.steps)
    told["noise_norm"] = noise.in_step * in_step
    told["averaged_noise_norm"] = noise.over_run * in_sum
    return told
