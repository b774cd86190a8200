"""How a run starts: from drawn weights, from exported ones, or from its own checkpoint.

A process decides by the names, owners and sizes of files alone. At the load rank 0 looks at them
again (`confirmed`). The history of a run's weights begins with it, is `resumed` from its checkpoint
or, where its checkpoints are gone, starts anew on its terms; `plan.settle` fixes the rest.

Guarantee:
    - Weights always come with their history: this run's with the ledger in their checkpoint, others
      with the `privacy.json` beside them. Weights without one are refused unless the user declares
      them public, which is recorded as an assumption. "Not private" stays with weights.
    - All that the runs behind the initial weights spent is composed with this run's, on any
      records: that bounds what is revealed of a unit of both runs, or of either.
    - Weights are resumed only where a start of this folder took their steps, so that its logs count
      them.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.tools.logging import logger

from torchtitan_dp.base.process import Fault
from torchtitan_dp.checkpoint.folder import (
    checkpoint_folder,
    checkpoint_folders,
    damage,
    drop_unfinished,
    finished_checkpoints,
    none_whole,
    read_ledger,
    read_metadata,
    refuse_another_model,
    set_aside,
    step_folder,
)
from torchtitan_dp.checkpoint.plan import Plan, settle
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import privacy_unit, weights_folder
from torchtitan_dp.config.load import changes
from torchtitan_dp.data.store import contents_hash, file_hash
from torchtitan_dp.gradients.optimizer import MomentumSGD
from torchtitan_dp.ledger import STARTS_FILE, Lineage, RunLog, Settings, check_fingerprint
from torchtitan_dp.ledger.lineage import (
    LATER,
    TRIAL,
    Ancestor,
    History,
    not_private,
    of_weights,
    with_caveats,
)
from torchtitan_dp.ledger.schema import (
    PRIVACY_FILE,
    TRIAL_FILE,
    is_release,
    ledger_of,
    read_published_fields,
)
from torchtitan_dp.ledger.spending import PUBLIC
from torchtitan_dp.models.weight_files import weight_files


@dataclass(frozen=True)
class Start:
    """The decided start of a run, with the ledger of its weights."""

    place: str = ""  # the folder of its weights
    key: str = ""  # the configuration's key that names it; without one they are drawn
    resumes: bool = False  # from a checkpoint of its own; else from a Hugging Face folder
    step: int = 0  # of that checkpoint

    @property
    def loads(self) -> bool:
        """Whether all weights are read from files (initial ones may lack adapters of LoRA)."""
        return bool(self.key)

    @property
    def initial(self) -> str | None:
        """The Hugging Face folder of initial weights, if any."""
        return self.place if self.loads and not self.resumes else None

    @functools.cached_property
    def own_ledger(self) -> Lineage | None:
        """The ledger of this run's own weights; None if there are none, or if their checkpoint
        cannot be read, which the load detects."""
        with contextlib.suppress(ValueError):
            return read_ledger(self.place) if self.resumes else None
        return None


def decide_start(config: JobConfig) -> Start:
    """Decide how a run starts. A checkpoint of its own comes first: the newest whose files have
    their sizes or, if all are damaged, the newest, which `check_start` or the load refuses.
    ValueError: a checkpoint is not the user's alone."""
    if not config.checkpoint.enable:
        return Start()
    folder = os.path.isdir(config.job.dump_folder) and checkpoint_folder(config)
    if folder and (steps := finished_checkpoints(folder)):
        whole = (step for step in steps if not damage(step_folder(folder, step)))
        return own_checkpoint(folder, next(whole, steps[0]))
    return Start(*weights_folder(config)) if config.checkpoint.initial_load_in_hf else Start()


def decision(config: JobConfig) -> Callable[[], Start]:
    """Return a function that decides how a run starts, once, at its first call: when rank 0 has
    locked the folder, so that no other run changes it."""
    return functools.cache(functools.partial(decide_start, config))


def own_checkpoint(folder: str, step: int) -> Start:
    return Start(step_folder(folder, step), "checkpoint.folder", True, step)


def confirmed(start: Start, folder: str) -> Start:
    """Return rank 0's decision, revised where it finds damage by now: a damaged checkpoint in this
    run's `folder` is set aside, in a warning, for an older whole one. Collective over the world.
    Fault, on all ranks: none is whole, or one is not the user's alone; nothing was moved."""
    dist.barrier()  # all ranks have decided what they draw or load
    decided: list[Any] = [start, ""]
    if dist.get_rank() == 0:
        decided = [*_newest_whole(start, folder)]
    dist.broadcast_object_list(decided, src=0)
    start, problem = decided
    if problem:
        raise Fault(problem)
    return start


def _newest_whole(start: Start, folder: str) -> tuple[Start, str]:
    """Return the start from the newest whole checkpoint, if there is any, and set damaged newer
    ones aside; or a problem: all are damaged, or one is not the user's alone."""
    if drop_unfinished(folder):
        logger.warning(f"{folder} has no whole checkpoint: starting from the beginning")
    problems: dict[int, str] = {}
    for step in finished_checkpoints(folder):
        try:
            problem = damage(step_folder(folder, step))
        except ValueError as error:  # it is not the user's alone
            return start, str(error)
        if not problem:
            break
        problems[step] = problem
    else:
        newest = next(iter(problems), None)
        return start, "" if newest is None else none_whole(folder, newest, problems[newest])
    for broken, problem in problems.items():
        logger.warning(
            f"checkpoint step-{broken} is damaged ({problem}): moved to "
            f"{set_aside(folder, broken)}; the run resumes from step-{step}"
        )
    return own_checkpoint(folder, step), ""


def check_start(start: Start, state_dict: Mapping[str, torch.Tensor], origin: str) -> None:
    """Refuse, by ValueError, this run's checkpoint if its files are damaged, or of another model
    than `state_dict`'s, whose tensors may be on `meta`, and whose shape has this `origin`."""
    if problem := damage(start.place):
        raise ValueError(none_whole(os.path.dirname(start.place), start.step, problem))
    refuse_another_model(start.place, state_dict, origin)


def refuse_another_optimizer(config: JobConfig, start: Start) -> None:
    """Refuse, by ValueError, to continue this run with an optimizer that has another state. A
    checkpoint that cannot be read is left to the load."""
    if not start.resumes or damage(start.place):
        return
    names = read_metadata(start.place).state_dict_metadata
    states = {name.rpartition(".")[2] for name in names if name.startswith("optimizer.state.")}
    momentum, name = MomentumSGD.__name__, config.optimizer.name
    earlier = "AdamW" if "exp_avg_sq" in states else momentum
    if states and (name == momentum) != (earlier == momentum):
        raise ValueError(
            f"optimizer.name = '{name}': the optimizer's state in {start.place} is of '{earlier}'; "
            "set it back, or start afresh in another job.dump_folder"
        )


def check_records(folder: str, fingerprint: str | None, settings: Mapping[str, object]) -> None:
    """Refuse, by ValueError, other records than those of this folder's run, if it has begun a step
    or saved one: no output depends on the records of a start that failed before. Without a
    fingerprint, as before they are read, their settings are compared alone."""
    if os.path.isdir(folder) and (RunLog(folder).count or checkpoint_folders(folder)):
        check_fingerprint(folder, fingerprint, settings)


def plan_start(config: JobConfig, units: int, start: Start, earlier: Lineage | None) -> Plan:
    """Plan the privacy budget of a run with this start, as `settle` does; `earlier` is the ledger
    of its folder (`plan.earlier_ledger`)."""
    terms: Settings | None = None
    if (loaded := start.own_ledger) is not None:
        history, terms = resumed(config, earlier or loaded, loaded)
    elif earlier is not None and start.resumes:  # an unreadable checkpoint: the load finds another
        history, terms = earlier, earlier.settings
    else:
        history = History()
        if earlier is not None:  # its checkpoints are gone: its terms stay, its steps start anew
            _refuse_to_leave_checkpoints(config)
            history, terms = of_weights(earlier, history), earlier.settings
        elif os.path.exists(os.path.join(config.job.dump_folder, TRIAL_FILE)):
            history = with_caveats(history, TRIAL)
        history = with_initial(history, config, start.initial)
    return settle(config, units, history, terms)


def _refuse_to_leave_checkpoints(config: JobConfig) -> None:
    """Raise ValueError for checkpoints in the run's folder, which `privacy.json` covers, and from
    which it would not resume."""
    is_on, folder = config.checkpoint.enable, config.checkpoint.folder
    setting = f"checkpoint.folder = '{folder}'" if is_on else "checkpoint.enable = false"
    if held := checkpoint_folders(config.job.dump_folder):
        raise ValueError(
            f"{setting}: this run has checkpoints in '{os.path.basename(held[0])}', from which "
            "it resumes; set it back, or start afresh in another job.dump_folder"
        )


def resumed(config: JobConfig, earlier: Lineage, loaded: Lineage) -> tuple[History, Settings]:
    """Return the history of weights that were loaded from a checkpoint of this run; the marks of
    `earlier`, the folder's ledger, are kept. ValueError: no start of this folder took their steps.
    """
    if not RunLog(config.job.dump_folder).knows(loaded.start):
        raise ValueError(
            f"checkpoint.folder: the newest checkpoint there, of step {loaded.steps}, was saved by "
            f"a start that {STARTS_FILE} in job.dump_folder = '{config.job.dump_folder}' lacks: "
            "copy a run's whole folder, or start from exports (checkpoint.initial_load_path)"
        )
    history = replace(
        with_caveats(earlier, *loaded.caveats),
        private=earlier.private and loaded.private,
        ancestors=tuple(dict.fromkeys([*earlier.ancestors, *loaded.ancestors])),
        planned_steps=max(earlier.planned_steps, loaded.planned_steps),
        audit=earlier.audit or loaded.audit,
    )
    with contextlib.suppress(ValueError, AttributeError):  # a file that cannot be read
        keys = [key for key in changes(config) if key.startswith(_LEARNS_BY)]
        if keys and loaded.steps < config.training.steps:
            history = with_caveats(
                history,  # without the step, which may show how long steps took
                f"{', '.join(keys)} changed {LATER}",
            )
    return of_weights(history, loaded), loaded.settings


_LEARNS_BY = "optimizer.", "lr_scheduler.", "ema."
"""Keys that may change at a resume, and change the weights."""


def with_initial(history: History, config: JobConfig, folder: str | None) -> History:
    """Return a history with the entries of the initial weights in a folder, if any, which it keeps
    forever. ValueError: they have no ledger, or no epsilon of this run could cover their steps."""
    if folder is None:
        return history
    if (earlier := ledger_beside(folder)) is None:
        _refuse_unknown(config, folder)
        return with_caveats(history, PUBLIC)
    history = with_caveats(history, *(f"of the initial weights: {one}" for one in earlier.caveats))
    if not earlier.private:
        return not_private(history, "the initial weights are not private")
    _refuse_what_does_not_compose(config, earlier, folder)
    planned, losses = earlier.steps + earlier.left, earlier.published_losses
    own = Ancestor(earlier.run, earlier.settings, earlier.steps, planned, earlier.lost)
    if losses is not None:
        own = replace(own, losses=losses.steps, noise_of_losses=losses.mechanism.noise_multiplier)
    history = with_caveats(
        history,
        f"the initial weights are of run {earlier.run}, whose steps are included",
        f"assumed: nothing that run {earlier.run} showed decided this run's noise, rate or steps, "
        "and its units of privacy are not larger than that run's",
    )
    ancestors = dict.fromkeys([*history.ancestors, *earlier.ancestors, own])
    return replace(history, ancestors=tuple(ancestors))


def ledger_beside(folder: str) -> Lineage | None:
    """Return the ledger of exported or released weights, by the `privacy.json` beside them, or
    beside the files that links in `folder` lead to; None without one. ValueError: they lie in a
    run's folder, where they may be of any step, or are of several runs."""
    weights = Path(folder).glob("*.safetensors")
    places = {Path(os.path.realpath(folder)), *(Path(os.path.realpath(w)).parent for w in weights)}
    found = []
    for place in places:
        content = read_published_fields(str(place))
        if content is not None and (is_release(content) or not content["private"]):
            found.append(ledger_of(content))
        elif content is not None or any((p / PRIVACY_FILE).exists() for p in place.parents):
            raise ValueError(
                f"'{folder}' lies in the folder of a run, and its weights have no {PRIVACY_FILE} "
                "of their own: start from its export (checkpoint.last_save_in_hf), or a release"
            )
    if any(one != found[0] for one in found):
        raise ValueError(f"'{folder}' has weights of several runs: start from those of one")
    return found[0] if found else None


def weights_of_node(start: Start) -> str:
    """Return a hash of initial weights and their ledger where this run has several nodes, of which
    each may have its own files under one path: a minute for 50 GB. Else, and without any, ""."""
    on_one_node = dist.get_world_size() == int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if start.initial is None or on_one_node:
        return ""
    ledger = os.path.join(start.initial, PRIVACY_FILE)
    paths = [*weight_files(start.initial), *([ledger] if os.path.exists(ledger) else ())]
    return contents_hash(file_hash(path, skip_unreadable=False) for path in paths)


def _refuse_unknown(config: JobConfig, path: str) -> None:
    """Raise ValueError unless weights without a ledger are declared public, and can be."""
    if not config.privacy.initial_weights_public:
        raise ValueError(
            f"privacy.initial_weights_public = false: the weights in '{path}' have no "
            "ledger of their spending; set it to true if they never saw private records"
        )
    if os.path.realpath(path).startswith(os.path.realpath(config.job.dump_folder) + os.sep):
        raise ValueError(f"checkpoint.initial_load_path = '{path}' is in job.dump_folder; move it")


def _refuse_what_does_not_compose(config: JobConfig, earlier: Lineage, path: str) -> None:
    """Raise ValueError if no epsilon of this run could cover the earlier one's steps."""
    remedy = f"start from other weights or, if they never saw these records, without {PRIVACY_FILE}"
    unit, rate = privacy_unit(config), config.privacy.sample_rate
    for theirs in (earlier.settings, *(ancestor.settings for ancestor in earlier.ancestors)):
        if theirs.privacy_unit != unit:
            raise ValueError(
                f"checkpoint.initial_load_path = '{path}': its unit of privacy is one "
                f"{theirs.privacy_unit}, this run's one {unit}, and no epsilon covers both; set "
                f"data.unit_field as it was there, {remedy}"
            )
        if theirs.neighbouring_relation == "zero_out" and rate is not None:  # this: add_remove
            raise ValueError(
                f"privacy.sample_rate = {rate:g}: the weights in '{path}' were trained at a rate "
                f"that followed from the number of records; leave it unset, {remedy}"
            )
