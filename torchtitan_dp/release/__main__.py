"""Release the weights of a private run, with their guarantee in words.

    python -m torchtitan_dp.release RUN OUT [--stop_not_from_results] [--lost_steps_not_seen]
        [--merged] [--no-ema] [--base_model NAME] [--with RUN] …

RUN is the `job.dump_folder` of a private run. OUT, which must not exist yet, becomes a Hugging Face
folder: weights, tokenizer, a model card (README.md), `privacy.json` and SHA-256 sums. A run
with `[lora]` gives adapters for PEFT or, merged, a whole model; one with `[ema]` the average of
weights or, with `--no-ema`, those after the last step. Optimizer state, logs, TensorBoard,
configuration, fingerprint and the list of executed steps are left out. It runs as one process on
the CPU, with the weights in fp32, and does not open the private records.

Guarantee:
    - The epsilon in OUT is never less than the spending (`release.card`). Of the terms only the
      released keys of `ledger.schema` are published.
    - A run that is not private is refused, and so is one whose `privacy.json` is missing or
      disagrees with the ledger in the checkpoint. The run's owner is trusted: consistent edits of
      checkpoint and log are not detected.
    - No JSON file has a path of this machine as a value (`models.hugging_face`).
"""

import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_dp.config.commands import first, parsed

if __name__ == "__main__":  # before PyTorch, which takes seconds to import
    first("release", __doc__)

# isort: split
import torch
import torch.nn as nn

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torch.distributed.checkpoint import CheckpointException

from torchtitan_dp.base.process import lock_folder, write_atomically
from torchtitan_dp.checkpoint.folder import (
    average_name,
    has_average,
    in_one_line,
    load,
    newest_finished_checkpoint,
    read_ledger,
    step_folder,
)
from torchtitan_dp.checkpoint.start import decide_start
from torchtitan_dp.config.load import exit_on_mistake, read_config
from torchtitan_dp.ledger.schema import read_run, write_published
from torchtitan_dp.ledger.spending import recorded
from torchtitan_dp.models.causal_lm.model import CausalLM
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.hugging_face import on_meta, without_lora
from torchtitan_dp.models.hugging_face_weights import write_folder
from torchtitan_dp.models.parameters import first_overflow, saved_tensors, trainable_parameters
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.release.card import (
    OWNER_ITEMS,
    add_up,
    check_base_model,
    claims,
    condition,
    covered,
    model_card,
    refuse_not_private,
)
from torchtitan_dp.train.check import check_model, warn_of_other_runs

CARD_FILE = "README.md"
SUMS_FILE = "SHA256SUMS"
BYTE_TOKENIZER = Path(__file__).parent / "byte_tokenizer"
"""`ByteTokenizer` as the files that transformers reads: the same ids, and a beginning mark comes
first, as in training. A text that spells out one of its two marks is read as that mark."""


def release(
    run: str,
    out: str,
    *,
    stop_not_from_results: bool = False,
    lost_steps_not_seen: bool = False,
    merge: bool = False,
    average: bool | None = None,
    base_model: str | None = None,
    others: Sequence[str] = (),
) -> dict[str, Any]:
    """Write OUT whole or not at all; return its `privacy.json`; ValueError, one line.

    `merge` writes whole weights where adapters were trained, as `lora.export = "merged"` does;
    `average` None the average of weights where the checkpoint has one.
    """
    run, out = os.path.abspath(run), os.path.abspath(out)
    _check_folders(run, out)
    if base_model is not None:
        check_base_model(base_model)
    with lock_folder(run, wait_s=0):
        published = read_run(run)
        if not published["private"]:
            refuse_not_private(run, recorded(published["caveats"]))
        config = read_config(run)
        if merge and not config.lora.rank:
            raise ValueError(f"--merged: RUN = '{run}' has no adapters (lora.rank = 0); omit it")
        merge = merge or config.lora.export == "merged"
        checkpoints = os.path.join(run, config.checkpoint.folder)
        if (step := newest_finished_checkpoint(checkpoints)) < 0:
            raise ValueError(
                f"RUN = '{run}': it has no whole checkpoint: run its train command again, with "
                "checkpoint.enable = true"
            )
        checkpoint = step_folder(checkpoints, step)
        lineage = read_ledger(checkpoint)
        terms = claims(
            run,
            checkpoint,
            lineage,
            stop_not_from_results=stop_not_from_results,
            lost_steps_not_seen=lost_steps_not_seen,
        )
        more = add_up(run, lineage, others) if others else None
        if average and not has_average(checkpoint):
            raise ValueError(
                f"--ema: {checkpoint} has no average of weights, since it was saved with "
                "ema.enable = false; omit --ema to release the weights after its last step"
            )
        average = has_average(checkpoint) if average is None else average
        args = check_model(config, decide_start(config))
        model = empty_model(args)
        load_weights(checkpoint, model, average=average)
        partial = f"{out}.tmp"
        try:
            os.makedirs(partial, mode=0o700)
            decay = config.ema.decay if average else None
            write_folder(model, config, partial, merge=merge, base_model=base_model)
            kept = without_lora(args) if merge else args
            card = model_card(terms, config, kept, decay=decay, base_model=base_model, more=more)
            _complete(partial, terms, card)
            os.rename(partial, out)
        except OSError as error:
            raise ValueError(f"OUT = '{out}': cannot be written ({error})") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    if (target := config.privacy.target_epsilon) is not None and terms["epsilon"] > target:
        print(f"warning: epsilon is above privacy.target_epsilon = {target:g}", file=sys.stderr)
    if more and (total := more[1].epsilon_planned):
        print(f"with the runs of --with, together: epsilon = {rounded_up(total)}", file=sys.stderr)
    warn_of_other_runs(config, "if given away, too, or used here (--with RUN), ", known=others)
    return terms


def _check_folders(run: str, out: str) -> None:
    read_run(run)  # before a lock, which makes the folder
    if os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise ValueError(f"OUT = '{out}': it exists already; name a new folder")
    if os.path.realpath(out).startswith(os.path.realpath(run) + os.sep):
        raise ValueError(f"OUT = '{out}': inside the run, which is private; name another folder")
    if os.path.lexists(f"{out}.tmp"):
        raise ValueError(f"OUT = '{out}': '{out}.tmp' is left from a failed release; remove it")


def empty_model(args: ModelArgs) -> CausalLM:
    """Build the model in fp32 on the CPU, with NaN wherever a checkpoint has values."""
    model: CausalLM = on_meta(args).to_empty(device="cpu")
    if args.tie_embeddings:  # to_empty gives the two places of one weight a tensor each
        model.output.weight = model.tok_embeddings.weight
    for tensor in saved_tensors(model).values():
        tensor.fill_(torch.nan)
    return model


def load_weights(folder: str, model: nn.Module, *, average: bool = False) -> None:
    """Read the weights (or the average of those trained), and nothing else, of a checkpoint into
    `model`, in place; ValueError if it lacks some, they have other shapes, or are not finite."""
    tensors, averaged = saved_tensors(model), trainable_parameters(model) if average else {}
    held = {average_name(name) if name in averaged else name: t for name, t in tensors.items()}
    try:
        load(held, folder, no_dist=True)
    except (CheckpointException, Exception) as error:  # the first is a BaseException only
        raise ValueError(
            f"{folder} cannot be read ({in_one_line(error)}): if it is broken, move it away, and "
            "the checkpoint before it is taken"
        ) from error
    if name := first_overflow(tensors.items()):
        raise ValueError(
            f"{folder}: {name} is not finite there, or not there; move this checkpoint away, "
            "and train on from the one before with a lower optimizer.lr"
        )


def _complete(folder: str, terms: dict[str, Any], card: str) -> None:
    """Write the files beside the model, all synced, the sums last."""
    if not os.path.exists(os.path.join(folder, "tokenizer.json")):
        for file in BYTE_TOKENIZER.iterdir():
            write_atomically(os.path.join(folder, file.name), file.read_bytes())
    write_published(folder, terms)
    sums = [f"{_sha256(os.path.join(folder, n))}  {n}\n" for n in sorted(os.listdir(folder))]
    write_atomically(os.path.join(folder, SUMS_FILE), "".join(sums).encode())
    write_atomically(os.path.join(folder, CARD_FILE), card.encode())  # its owner fills it in


def _sha256(path: str) -> str:
    """Hash the file as it is on the disk, which is why it is synced first."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def main(argv: list[str]) -> None:
    options, _ = parsed("release", __doc__, argv)
    with exit_on_mistake():
        terms = release(
            options.run,
            options.out,
            stop_not_from_results=options.stop_not_from_results,
            lost_steps_not_seen=options.lost_steps_not_seen,
            merge=options.merged,
            average=options.ema,
            base_model=options.base_model,
            others=options.others,
        )
    only = f"\n          {stated}" if (stated := condition(terms)) else ""
    unit = terms["privacy_unit"] + ", not all of a person's" * (terms["privacy_unit"] == "record")
    print(
        f"released: {options.out}/: epsilon = {rounded_up(terms['epsilon'])}, delta = "
        f"{terms['delta']}, for one {unit}; it counts {covered(terms)}{only}\n"
        f"          before you give it to anybody, fill in, in {CARD_FILE}: 'Whose data', 'Signed "
        f"by, on'\n          before you publish it, also: {', '.join(OWNER_ITEMS)}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
