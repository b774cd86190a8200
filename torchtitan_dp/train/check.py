"""Checks before anything is started, and notices to the owner of the records, by the plan and by
every worker of a run: a mistake that a record brings to light after some steps would reveal that
record (hazard row 47).

Among them are settings by which steps spend epsilon and cannot change a weight (row 69), and models
whose modules mix the samples of a microbatch (row 79); kernels for the model, and enough memory on
the machine's hosts: that of blocks' inputs that `activation_checkpoint.offload_inputs` keeps there,
and of the copy of the state that a save beside the run makes (`checkpoint.async_mode`). Not counted
are each process's own (libraries, the CUDA context, communication: some GiB a rank), samples, and
the state of a run that trains on CPUs.

Guarantee:
    Whether a run is refused for its memory depends on its configuration and on the memory that its
    machine has left, and is the same on all ranks. This assumes that the index of the records, some
    MiB, does not tip the balance.
"""

import dataclasses
import glob
import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_dp.base.process import Fault, say, typed, untested, warn
from torchtitan_dp.base.torch_private import DispatchMode
from torchtitan_dp.checkpoint.folder import refuse_other_settings
from torchtitan_dp.checkpoint.plan import (
    Plan,
    config_hash,
    earlier_ledger,
    refuse_deltas,
    refuse_private_folder,
    schedule,
)
from torchtitan_dp.checkpoint.start import (
    Start,
    check_records,
    check_start,
    decide_start,
    plan_start,
    refuse_another_optimizer,
)
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import (
    METHODS,
    TRANSFORMERS,
    config_file,
    mesh_degrees,
    most_tokens,
    never_trained,
    record_paths,
    trains_one_sample,
    unit_word,
)
from torchtitan_dp.data.dataset import Records, Samples, describe, settings_of
from torchtitan_dp.data.prepare import Source, prepared
from torchtitan_dp.data.reading import reading
from torchtitan_dp.data.store import runs_beside
from torchtitan_dp.data.tokenizer import ByteTokenizer, load_tokenizer
from torchtitan_dp.distributed.devices import available_bytes, has_accelerator
from torchtitan_dp.distributed.host_memory import page_locked_bytes
from torchtitan_dp.distributed.windows import check_softcap
from torchtitan_dp.gradients.optimizer import MomentumSGD
from torchtitan_dp.ledger import EXECUTED_FILE, PRIVACY_FILE
from torchtitan_dp.ledger.log import read_fingerprint
from torchtitan_dp.ledger.schema import TRIAL_FILE, read_published_fields
from torchtitan_dp.models.causal_lm.model import CausalLM
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.hugging_face import (
    check_weights,
    on_meta,
    origin,
    parameter_count,
    read_settings,
    shape,
    skeleton,
    trained_count,
)
from torchtitan_dp.models.hugging_face_weights import EXPORT_FOLDER, tokenizer_files
from torchtitan_dp.models.weight_files import weight_files


@dataclasses.dataclass(frozen=True)
class Checked:
    """The start, model, records and plan of a checked configuration."""

    start: Start
    args: ModelArgs
    records: Records
    samples: Samples  # as training makes them
    plan: Plan | None  # None without privacy


def open_records(config: JobConfig, source: Source | None = None) -> Records:
    """Open the records that a configuration names; raise ValueError, one line, if it cannot."""
    source = source or source_of(config)
    data, privacy = config.data, config.privacy
    number_is_secret = privacy.enable and privacy.sample_rate is not None
    if number_is_secret:
        source.refuse_names_by_position(data.heldout_fraction, privacy.noise == "banded")
    files = source.files()
    return Records.of(
        source,
        files,
        prepared(source, data.store, files),
        heldout_fraction=data.heldout_fraction,
        needs_heldout=config.validation.enable,
        number_is_secret=number_is_secret,
    )


def source_of(config: JobConfig) -> Source:
    """Return the files that a configuration names, and how they are read."""
    data, training, assets_path = config.data, config.training, config.model.hf_assets_path
    tokenizer = load_tokenizer(assets_path)
    how = reading(data.text_field, data.prompt_field, data.messages_field, assets_path, tokenizer)
    units = data.unit_field, data.not_owners
    return Source(training.dataset, record_paths(config), how, tokenizer, *units)


def check_run(config: JobConfig, *, units: int | None = None) -> Checked:
    """Check all of a run that one plain process can, and write nothing but the store of tokens;
    ValueError, one line. `units` is the number of units, for a plan without records."""
    check_packages(config)
    check_learning(config)
    start = decide_start(config)
    check_names(config, start)
    if start.step > (steps := config.training.steps):
        raise ValueError(f"training.steps = {steps}: {start.step} were taken; give no fewer")
    source = source_of(config)
    folder, earlier, plan = config.job.dump_folder, None, None
    if not config.privacy.enable:
        refuse_private_folder(folder)
    else:  # refuse other terms than those of the run in the folder
        if units is None:
            check_records(folder, None, settings_of(source, config.data.heldout_fraction))
        refuse_another_optimizer(config, start)
        if (earlier := earlier_ledger(folder)) is not None:
            plan = plan_start(config, earlier.settings.implied_units, start, earlier)
    args = check_model(config, start)
    if units is None:
        records = open_records(config, source)
        samples = build_samples(records, config)
        found = records.check_targets(samples)
        records = dataclasses.replace(records, warnings=records.warnings + found)
    else:
        records = Records.empty(source, units, config.data.heldout_fraction)
        samples = build_samples(records, config)
    if config.privacy.enable:
        owners = records.store.facts.get("owners") or {}
        refuse_deltas(config, len(records.heldout), owners.get("in_units"))
        if units is None:
            check_records(folder, records.fingerprint, records.settings)
        if plan is None or plan.settings.implied_units != len(records.train):
            plan = plan_start(config, len(records.train), start, earlier)
    return Checked(start, args, records, samples, plan)


def build_samples(records: Records, config: JobConfig) -> Samples:
    """Build the samples of `[data]`."""
    data, source = config.data, records.source
    assert data.unit_sampling != "auto"  # resolved at load
    assert data.long_records != "auto"
    return Samples(
        records.store,
        config.training.seq_len,
        one_record=data.unit_sampling == "random",
        window=data.long_records == "window",
        has_answers=source.reading.has_answers,
        pad_id=source.tokenizer.eos_id or 0,
    )


def check_packages(config: JobConfig) -> None:
    """Refuse, by ValueError, a service whose package is not installed."""
    if config.metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError("metrics.enable_wandb = true: needs pip install 'torchtitan-dp[wandb]'")


def check_model(config: JobConfig, start: Start) -> ModelArgs:
    """Return the shape of the model that a run trains; ValueError, one line, if it cannot be built
    or computed here, its files do not fit it, or its tokenizer has ids outside its vocabulary."""
    args = shape(config)
    model = skeleton(args)  # refuses unknown targets of adapters
    if config.model.name == TRANSFORMERS:  # TorchTitan's own are known to compute
        check_forward(args, config.training.local_batch_size if config.privacy.enable else 1)
    if config.privacy.enable and METHODS[config.privacy.gradient_method].per_sample_layers:
        on_meta(args).use_per_sample_layers()  # refuses samples that meet
    if config.training.feed_forward_chunk not in ("auto", 0) and not model.gated:
        raise ValueError("training.feed_forward_chunk: this model's cannot be tiled; use 'auto'")
    check_attention(config, args)
    check_norms(config, args)
    check_files(config, args, start)
    tokens = load_tokenizer(config.model.hf_assets_path).get_vocab_size()
    if tokens > args.vocab_size:
        raise ValueError(
            f"model.hf_assets_path = '{config.model.hf_assets_path}': its tokenizer has {tokens} "
            f"tokens, more than the {args.vocab_size} of {origin(config)}; use the model's own"
        )
    return args


def check_names(config: JobConfig, start: Start) -> None:
    """Refuse, by ValueError, folders that are missing or hold no weights, and an export that cannot
    be written, before a file is read."""
    assets, at = config.model.hf_assets_path, f"{start.key} = '{start.place}'"
    if start.resumes and assets and not os.path.isdir(assets):  # the shape would be another one
        raise ValueError(f"model.hf_assets_path = '{assets}': no such folder; name the run's first")
    if config.checkpoint.last_save_in_hf:
        target = os.path.join(config.job.dump_folder, EXPORT_FOLDER)
        for key, used in (
            ("model.hf_assets_path", assets),
            ("checkpoint.initial_load_path", config.checkpoint.initial_load_path),
            ("checkpoint.folder", os.path.join(config.job.dump_folder, config.checkpoint.folder)),
        ):
            inside = os.path.realpath(used or "/") + os.sep
            if inside.startswith(os.path.realpath(target) + os.sep):
                raise ValueError(
                    f"{key} = '{used}': checkpoint.last_save_in_hf would replace it by its own "
                    f"'{target}'; use another job.dump_folder, or move it"
                )
        tokenizer_files(config)
    if start.loads and not os.path.isdir(start.place):
        raise ValueError(f"{at}: no such folder; name the one with initial weights, or the hub's")
    if start.initial is not None:
        try:
            if os.path.exists(os.path.join(start.place, ".metadata")):
                raise ValueError("it is a checkpoint: name the run's hf/, or a release of it")
            weight_files(start.place)
        except ValueError as mistake:
            drawn = "or start from random ones, with checkpoint.initial_load_in_hf = false"
            raise ValueError(f"{at}: {mistake}, {drawn}") from None


def check_files(config: JobConfig, args: ModelArgs, start: Start) -> None:
    """Refuse, by ValueError, weights that cannot be loaded."""
    if start.resumes:
        check_start(start, skeleton(args).state_dict(), origin(config))
        refuse_other_settings(start.place, args.settings, origin(config))
    elif start.loads:
        check_weights(f"{start.key} = '{start.place}'", start.place, args)
        if isinstance(load_tokenizer(config.model.hf_assets_path), ByteTokenizer):
            raise ValueError(
                f"model.hf_assets_path = '{config.model.hf_assets_path}': text would be read as "
                f"bytes; name the folder with the tokenizer.json of {start.key} = '{start.place}'"
            )


def is_done(config: JobConfig, checked: Checked) -> bool:
    """Return whether an earlier start of this configuration left nothing to do: no step, no loss to
    publish, no export, nothing to send, and nothing lost that `privacy.json` does not have."""
    folder, step, plan = config.job.dump_folder, checked.start.step, checked.plan
    if not checked.start.resumes or step < config.training.steps or config.metrics.enable_wandb:
        return False
    if plan is None or (plan.ledger.heldout_loss and plan.ledger.heldout_loss.is_due(step)):
        return False
    wanted = step, plan.ledger.steps_executed, config_hash(config)
    places = [folder, *([f"{folder}/{EXPORT_FOLDER}"] * config.checkpoint.last_save_in_hf)]
    found = [read_published_fields(place) or {} for place in places]
    keys = "steps", "steps_executed", "config_hash"
    return all(tuple(map(one.get, keys)) == wanted for one in found)


def show_notices(config: JobConfig, checked: Checked) -> None:
    """Print warnings of the records and notices of the configuration, as a plan does."""
    show_records(config, checked, brief=False)
    for line in tokenizer_lines(config, checked.records.source) + notices(config):
        print(f"      {line}", file=sys.stderr)


def warn_of_other_runs(
    config: JobConfig, when: str, records: Records | None = None, known: Sequence[str] = ()
) -> None:
    """Warn of other runs than the `known` on a run's records, by default those that it trained on,
    or on units of the same names; print the command that adds up all private ones' epsilons."""
    run = config.job.dump_folder
    is_trial = os.path.exists(os.path.join(run, TRIAL_FILE))  # its search adds up all trials
    search = os.path.dirname(os.path.realpath(run)) if is_trial else None
    runs = {*runs_beside(run, config.data.store, records.store if records else None)}
    runs = {one for one in runs - {*map(os.path.realpath, known)} if os.path.dirname(one) != search}
    others = sorted(one for one in runs if os.path.exists(os.path.join(one, PRIVACY_FILE)))
    gone = sum(not os.path.isdir(one) for one in runs)
    if count := len(others) + gone:
        private = [one for one in others if os.path.exists(os.path.join(one, EXECUTED_FILE))]
        who = f"{count} other runs" if count > 1 else (others or ["another run"])[0]
        trained = f"{who} trained on these records, or on units with these names"
        own = records.fingerprint if records else read_fingerprint(run)
        differ = {own} != {read_fingerprint(one) for one in [*private, *known]}
        add_up = typed(f"ledger {shlex.join([run, *private, *known])}{' --overlapping' * differ}")
        public = shlex.join(one for one in others if one not in private)
        none = f"; none covers what was trained without privacy: {public}" if public else ""
        none += f"; {gone} of these, whose folders are gone, may count, too" * (gone > 0)
        print(f"warning: {trained}: {when}epsilons add up: {add_up}{none}", file=sys.stderr)


def show_records(config: JobConfig, checked: Checked, *, brief: bool) -> None:
    """Print what is known of the records, or warnings alone, labelled not private."""
    for warning in checked.records.warnings:
        warn(warning)
    if checked.records.fingerprint and config.privacy.enable:
        warn_of_other_runs(config, f"for each {unit_word(config)} ", checked.records)
    if checked.records.fingerprint and not brief:  # else they are none, but a number
        for line in describe(checked.records.figures(checked.samples), unit_word(config)):
            say(line)


def notices(config: JobConfig) -> list[str]:
    """List the notices of the configuration, and of releases that are not tested."""
    lines = untested()
    training, checkpoint = config.training, config.checkpoint
    if training.seq_len > (window := shape(config).max_seq_len):
        lines.append(
            f"warning: training.seq_len = {training.seq_len:,} is beyond the model's {window:,} "
            "positions (max_position_embeddings); its config.json can extend them (docs/running.md)"
        )
    if config.lora.rank and not checkpoint.initial_load_in_hf:
        lines.append("warning: lora.rank: adapters of random weights, which stay as drawn")
    folder = config.model.hf_assets_path
    if folder and not checkpoint.initial_load_in_hf and not checkpoint.initial_load_path:
        weights = glob.glob(os.path.join(glob.escape(folder), "*.safetensors"))
        lines.append(
            "the weights in model.hf_assets_path need checkpoint.initial_load_in_hf = true"
            if weights
            else f"{folder} has no weights: training starts from drawn ones"
        )
    return lines


def tokenizer_lines(config: JobConfig, source: Source) -> list[str]:
    """Describe the tokenizer, an end that is never learned, and text that no sample has."""
    where, tokenizer = config.model.hf_assets_path, source.tokenizer
    template = source.reading.template
    if template is None:
        ids, mark = [tokenizer.eos_id], "the tokenizer's eos"
    else:
        encoded = tokenizer.encode(template.end_mark)
        ids, mark = [] if encoded is None else encoded.tolist(), f"{template.end_mark!r}"
    end, stops, path = None, None, ""
    files = [os.path.join(where, "generation_config.json")] * bool(where)
    for path in filter(os.path.isfile, [*files, *(config_file(config) or ())[:1]]):
        if (stops := read_settings(path, "model.hf_assets_path").get("eos_token_id")) is not None:
            break  # as transformers' `generate` looks for it
    if ids in ([], [None]):
        lack = "the tokenizer has no eos" if template is None else template.lacks_end
        end = f"{lack}: the model never learns to stop"
    elif len(ids) > 1:
        end = (
            f"warning: answers end with {mark}, {len(ids)} tokens of this tokenizer: what is "
            "released would write it and go on; take the tokenizer and template of one model"
        )
    elif stops is not None and ids[0] not in (stops if isinstance(stops, list) else [stops]):
        end = (
            f"warning: records end with {mark}, {ids[0]}, and {path} has eos_token_id = {stops}: "
            f"what is released would not stop; set it to {ids[0]} there"
        )
    named = f"{tokenizer.describe()}, from {where or 'no model.hf_assets_path'}"
    return [f"tokenizer: {named}", *filter(None, [end, never_trained(config)])]


SMALLEST = 1e-12
_LAST = 0.01  # of the steps, which a decay to zero may leave without a change


def factors(config: JobConfig) -> dict[int, float]:
    """Return the schedule's factor of each step, or of many of them and the last."""
    steps, factor = config.training.steps, schedule(config)
    looked_at = {*range(0, steps, steps // 10_000 + 1), steps - 1}
    return {index + 1: factor(index) for index in sorted(looked_at)}


def check_learning(config: JobConfig) -> None:
    """Refuse, by ValueError with the key, steps that cannot change a weight: all of a run with
    privacy, or its last ones.

    AdamW moves a value by about its learning rate, and by less where `optimizer.eps` is above the
    gradients; adapters change weights by alpha / rank of that. Weights of fp32 that are not next to
    zero keep no change below `SMALLEST`.
    """
    if not config.privacy.enable:
        return
    optimizer, lora, steps = config.optimizer, config.lora, config.training.steps
    spends = "every step would spend epsilon, and none change a weight"
    scales = [("optimizer.lr", optimizer.lr, optimizer.lr, "raise it (1e-3, say)")]
    if optimizer.name != MomentumSGD.__name__ and optimizer.eps > config.privacy.max_grad_norm:
        part = config.privacy.max_grad_norm / optimizer.eps
        scales.append(("optimizer.eps", optimizer.eps, part, "lower it (1e-8, say)"))
    if lora.rank:
        part = lora.alpha / lora.rank
        scales.append(("lora.alpha", lora.alpha, part, "raise it (2 x rank, say)"))
    change = 1.0
    for key, value, part, remedy in scales:
        change *= part
        if change < SMALLEST:
            raise ValueError(f"{key} = {value:g}: {spends}; {remedy}")
    changing = (step for step, factor in factors(config).items() if factor * change >= SMALLEST)
    last, scheduler = max(changing, default=0), config.lr_scheduler
    if last < min(steps, 1) or steps - last > max(1, _LAST * steps):
        raise ValueError(
            f"lr_scheduler.warmup_steps = {scheduler.warmup_steps}, min_lr_factor = "
            f"{scheduler.min_lr_factor:g}: steps after {last} of {steps} would spend epsilon and "
            "change no weight; lower the first, raise the second, or lower training.steps"
        )


_TOKENS, _VOCABULARY = 16, 64


def check_forward(args: ModelArgs, samples: int) -> None:
    """Refuse, by ValueError, a model whose modules ask for what is not built, or mix the samples of
    a microbatch where no module shows it: a small one computes logits.

    Experts take the tokens of all samples at once, so another sample decides in which row of a
    product a token lies, and by it how the product rounds; routing turns rounding into jumps. So
    each product's rows are scaled here by where they lie.
    """
    shared = args.n_heads // args.n_kv_heads
    sizes = {"n_layers": 1, "vocab_size": _VOCABULARY, "max_seq_len": _TOKENS}
    small = args.with_heads(2 * shared, 2, **sizes)
    with torch.device("cpu"), torch.no_grad():
        model = CausalLM(small)
        model(torch.zeros(1, _TOKENS, dtype=torch.int64))
        if samples > 1 and model.meeting is None and is_moved_by_others(model):
            raise ValueError(
                f"training.local_batch_size = {samples}: in a {type(model.model).__name__} a "
                "sample's losses depend on the samples beside it; set it to 1"
            )


def is_moved_by_others(model: CausalLM) -> bool:
    """Return whether a sample's logits move with the samples beside it."""
    generator = torch.Generator().manual_seed(0)
    first, *others = torch.randint(_VOCABULARY, (4, 1, _TOKENS), generator=generator)
    model.init_weights()
    with torch.no_grad(), _ScaledByPlace():
        before, *after = (model(torch.cat((first, other)))[0] for other in others)
    return not all(torch.equal(logits, before) for logits in after)


class _ScaledByPlace(DispatchMode):
    """Scales each row of a product's result by its place, and by the number of rows."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if "mm" in function.overloadpacket.__name__:  # mm, addmm, bmm, baddbmm, _grouped_mm
            assert isinstance(result, Tensor)
            rows = result.shape[:-1].numel()
            places = torch.arange(rows, dtype=result.dtype).mul_(1.7).add_(rows).sin_()
            result.mul_(places.mul_(0.01).add_(1).view(*result.shape[:-1], 1))
        return result


GIB = 2**30


def check_attention(config: JobConfig, args: ModelArgs) -> None:
    """Refuse a ring of fp32 with grouped queries on an accelerator: flash and cuDNN take 16 bits
    only, and the memory-efficient kernel no grouped queries."""
    cp, dtype = (config.parallelism.context_parallel_degree, config.training.mixed_precision_param)
    grouped = args.n_kv_heads != args.n_heads
    if cp > 1 and dtype == "float32" and grouped and has_accelerator():
        raise ValueError(
            f"training.mixed_precision_param = '{dtype}': with context_parallel_degree = {cp} and "
            f"{args.n_heads} heads that share {args.n_kv_heads} keys no kernel for this device "
            "attends in 32 bits; set it to 'bfloat16', or parallelism.context_parallel_degree to 1"
        )
    if args.settings.get("attn_logit_softcapping"):
        for window in set(args.windows()):
            check_softcap(config.training.seq_len, window)


def check_norms(config: JobConfig, args: ModelArgs) -> None:
    """Refuse more values a rank than the 32-bit indices of PyTorch's RMSNorm on CUDA can reach:
    beyond 2^32 it would read other rows, in silence."""
    tokens = most_tokens(config)
    width = max(args.dim, args.n_heads * args.head_dim)
    if tokens * width > 2**32 and has_accelerator():
        raise ValueError(
            f"training.seq_len = {config.training.seq_len}: {tokens:,} tokens a rank of "
            f"{width:,} values exceed the 2^32 that RMSNorm on CUDA can index; raise "
            f"parallelism.context_parallel_degree = {config.parallelism.context_parallel_degree}"
        )


class HostMemory(NamedTuple):
    """The memory of one rank on its host, in bytes."""

    inputs: int  # page-locked, of all blocks, where they are offloaded: of the longest samples
    copy: int  # of the state, while it is saved beside the run


def host_memory(config: JobConfig, args: ModelArgs) -> HostMemory:
    """Predict a rank's memory on its host, for a checked configuration; it needs no device."""
    training, checkpoint = config.training, config.checkpoint
    _, dp_shard, cp = mesh_degrees(config)
    size = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize
    inputs = copy = 0
    if config.activation_checkpoint.offload_inputs:
        at_once = 1 if trains_one_sample(config) else training.local_batch_size
        values = at_once * training.seq_len // cp * args.dim
        inputs = args.n_layers * page_locked_bytes(values * size)
    if checkpoint.enable and checkpoint.async_mode.lower() != "disabled":
        trained = trained_count(args)
        frozen = parameter_count(args) - trained  # kept in the dtype of compute
        moments = 1 if config.optimizer.name == MomentumSGD.__name__ else 2
        values = 1 + moments + config.ema.enable
        copy = (4 * values * trained + size * frozen) // (dp_shard * cp)
    return HostMemory(inputs, copy)


def refuse_lack(config: JobConfig, args: ModelArgs, ranks: int, available: int | None) -> None:
    """Refuse, by ValueError, a node that does not hold what its ranks offload; `available` are the
    bytes that they may still take together, None if that is not known."""
    if not config.activation_checkpoint.offload_inputs or available is None:
        return
    inputs, copy = host_memory(config, args)
    needed = ranks * (inputs + copy)
    if needed > available:
        saved = "checkpoint.async_mode = 'disabled', " if copy else ""
        raise ValueError(
            f"activation_checkpoint.offload_inputs = true: {ranks} ranks of a node need "
            f"{needed / GIB:,.2f} GiB of its memory (a rank {inputs / GIB:,.2f} for inputs and "
            f"{copy / GIB:,.2f} to save beside the run), of {available / GIB:,.2f} GiB; lower "
            f"training.seq_len, raise context_parallel_degree, {saved}or set it to false"
        )


def require_host_memory(config: JobConfig) -> None:
    """Refuse to train, by Fault on all ranks, where a node does not hold what its ranks offload.
    Collective under any configuration: an all-gather over the world of one line or nothing."""
    refusals, refusal = [""] * dist.get_world_size(), ""
    try:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        refuse_lack(config, shape(config), ranks, available_bytes())
    except ValueError as error:
        refusal = str(error)
    dist.all_gather_object(refusals, refusal)
    for rank, line in enumerate(refusals):
        if line:
            raise Fault(f"{line} (found on rank {rank})")
