"""Features of TorchTitan that are refused with privacy: each would go behind its back.

They read, move or clip gradients, change who is sampled, lose the ledger, or tell what is private.
"""

from torchtitan_dp.config import JobConfig
from torchtitan_dp.gradients.methods import METHODS


def check_conflicts(config: JobConfig) -> None:
    """Refuse what would go behind the back of privacy.

    Raises:
        ValueError: one line for the user, that names the key, its value and the remedy.
    """
    method = config.privacy.gradient_method
    compiled = " or ".join(f"'{name}'" for name, other in METHODS.items() if other.compiles)
    conflicts: list[tuple[bool, str, object, str]] = [
        (
            config.training.max_norm != 0,
            "training.max_norm",
            config.training.max_norm,
            "set it to 0; each record's gradient is clipped by privacy.max_grad_norm",
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
            config.compile.enable and not METHODS[method].compiles,
            "compile.enable",
            True,
            f"set it to false, or privacy.gradient_method to {compiled}; the layers of '{method}' "
            "act within backward, which cannot be compiled",
        ),
        (
            METHODS[method].backward_passes(config.privacy) > 1
            and config.activation_checkpoint.mode == "selective"
            and config.activation_checkpoint.selective_ac_option == "op",
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
            "set it to true; to go on with another run, with its optimizer and its ledger, copy "
            "its whole job.dump_folder",
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
