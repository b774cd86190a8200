"""Features of TorchTitan that would break the privacy guarantee, and are refused.

They read, move or clip gradients, change who is sampled, lose the ledger, or leak private values.
"""

from torchtitan_dp.config import JobConfig
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.privacy.mechanism import mechanism_of


def check_conflicts(config: JobConfig) -> None:
    """Refuse settings that would break the privacy guarantee.

    Raises:
        ValueError: one line for the user, that names the key, its value and the remedy.
    """
    method = config.privacy.gradient_method
    by_regions = config.compile.enable and METHODS[method].compiles == "regions"
    twice = METHODS[method].backward_passes(config.privacy) > 1
    checkpointing = config.activation_checkpoint
    by_operation = checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op"
    conflicts: list[tuple[bool, str, object, str]] = [
        *_of_mechanism(config),
        (
            config.training.max_norm != 0,
            "training.max_norm",
            config.training.max_norm,
            "set it to 0; each record's gradient is clipped by privacy.max_grad_norm",
        ),
        (
            config.training.loss_scale != 1,
            "training.loss_scale",
            config.training.loss_scale,
            "set it to 1; a scaled loss scales the gradient that is clipped to "
            "privacy.max_grad_norm, and can only overflow; where fp16 loses small gradients, set "
            "training.mixed_precision_param to 'bfloat16'",
        ),
        (
            config.privacy.clipping == "flat" and bool(config.privacy.clipping_groups),
            "privacy.clipping_groups",
            config.privacy.clipping_groups,
            "remove it, or set privacy.clipping to 'per_layer'; 'flat' clips all as one group",
        ),
        (
            config.optimizer.early_step_in_backward,
            "optimizer.early_step_in_backward",
            True,
            "set it to false; the step needs the whole batch's clipped sum",
        ),
        (
            bool(config.model.converters),
            "model.converters",
            config.model.converters,
            "remove them; float8 and other converters are not supported with privacy",
        ),
        (
            by_regions and by_operation,
            "activation_checkpoint.selective_ac_option",
            "'op'",
            "set it to a number ('1'), or compile.enable to false; it chooses among operations, "
            f"and those that '{method}' compiles would run uncompiled",
        ),
        (
            by_regions and checkpointing.mode == "memory_budget",
            "activation_checkpoint.mode",
            "'memory_budget'",
            f"set it to 'full'; the budget is of compiled blocks, and '{method}' compiles only "
            "what lies between their layers",
        ),
        (
            twice and config.compile.enable,
            "privacy.ghost_passes",
            "'two'",
            "compiled code runs backward once; set ghost_passes = 'one', or compile.enable = false",
        ),
        (
            twice and by_operation,
            "privacy.ghost_passes",
            "'two'",
            "with activation_checkpoint.selective_ac_option = 'op' PyTorch allows one backward "
            "pass; set ghost_passes = 'one', or selective_ac_option = '1'",
        ),
        (
            config.training.enable_cpu_offload,
            "training.enable_cpu_offload",
            True,
            "set it to false; it is not supported with privacy",
        ),
        (
            config.training.dtype != "float32",
            "training.dtype",
            config.training.dtype,
            "set it to 'float32' (and mixed_precision_param to 'bfloat16' for bf16 compute); "
            "norms, noise and updates need fp32",
        ),
        (
            bool(config.checkpoint.exclude_from_loading),
            "checkpoint.exclude_from_loading",
            config.checkpoint.exclude_from_loading,
            "remove it; weights must come with the ledger of what they spent",
        ),
        (
            config.checkpoint.load_step != -1,
            "checkpoint.load_step",
            config.checkpoint.load_step,
            "set it to -1; a branch from an earlier step would share this folder's ledger",
        ),
        (
            config.checkpoint.folder in ("", ".", "..")
            or "/" in config.checkpoint.folder
            or config.checkpoint.folder.endswith(".damaged"),
            "checkpoint.folder",
            repr(config.checkpoint.folder),
            "give the name of a folder inside job.dump_folder ('checkpoint')",
        ),
        (
            config.checkpoint.last_save_model_only,
            "checkpoint.last_save_model_only",
            True,
            "set it to false: a checkpoint of weights alone lacks the ledger of what they spent; "
            "python -m torchtitan_dp.release publishes them with it",
        ),
        (
            not config.checkpoint.initial_load_model_only,
            "checkpoint.initial_load_model_only",
            False,
            "set it to true; to continue another run with its optimizer and ledger, copy its "
            "whole job.dump_folder",
        ),
        (
            config.fault_tolerance.enable,
            "fault_tolerance.enable",
            True,
            "set it to false; replicas that come and go would change who is sampled",
        ),
        (
            config.comm.mode != "default",
            "comm.mode",
            config.comm.mode,
            "set it to 'default'; the others do not train",
        ),
        (
            config.checkpoint.async_mode.lower() == "async_with_pinned_mem",
            "checkpoint.async_mode",
            config.checkpoint.async_mode,
            "use 'async'; the process that saves would outlive a killed run, and write into the "
            "next one's checkpoint",
        ),
        (
            config.metrics.enable_wandb,
            "metrics.enable_wandb",
            True,
            "use metrics.enable_tensorboard; losses and paths, which are not private, would be "
            "sent to somebody else",
        ),
        (
            config.checkpoint.create_seed_checkpoint,
            "checkpoint.create_seed_checkpoint",
            True,
            "remove it; initial weights follow from debug.seed on any mesh",
        ),
    ]
    for refused, key, value, remedy in conflicts:
        if refused:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ValueError(f"{key} = {shown}: {remedy}")


def _of_mechanism(config: JobConfig) -> list[tuple[bool, str, object, str]]:
    """List what the accounting of the mechanism does not cover."""
    estimates = METHODS[config.privacy.gradient_method].estimates_norms
    mechanism = mechanism_of(
        config.privacy, noise_multiplier=1.0, sample_rate=1.0, estimates_norms=estimates
    )
    return mechanism.refusals(config.privacy)
