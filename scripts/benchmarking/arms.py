"""The arms of the benchmark, and the settings in which they are compared."""

from dataclasses import dataclass

NOT_PRIVATE = ("--privacy.no-enable",)
PRIVATE = ("--privacy.enable", "--privacy.target_epsilon=None", "--privacy.noise_multiplier=1.0")
CHECKPOINTED = " + AC"
ADAPTED = " + LoRA"


@dataclass(frozen=True)
class Arm:
    """One way to train: a name, and what it overrides in the configuration."""

    name: str
    overrides: tuple[str, ...]
    opacus: str | None = None  # "hooks" or "ghost": Opacus itself, on one process
    checkpointed: bool = False  # full activation checkpointing
    adapted: bool = False  # adapters are trained, beside frozen weights
    stock: bool = False  # without our norms, loss head, tiles and gathered weights

    @property
    def baseline(self) -> str:
        """The arm without privacy that this one is held against, which trains the same."""
        return "non-DP" + ADAPTED * self.adapted + CHECKPOINTED * self.checkpointed


def _with_and_without_checkpointing(name: str, *overrides: str) -> list[Arm]:
    return [
        Arm(name, (*overrides, "--activation_checkpoint.mode=none")),
        Arm(
            name + CHECKPOINTED,
            (*overrides, "--activation_checkpoint.mode=full"),
            checkpointed=True,
        ),
    ]


_BOTH_WAYS = [
    _with_and_without_checkpointing("non-DP", *NOT_PRIVATE),
    _with_and_without_checkpointing("microbatch", *PRIVATE, "--privacy.gradient_method=microbatch"),
    _with_and_without_checkpointing(
        "V1", *PRIVATE, "--privacy.gradient_method=grad_sample", "--privacy.no-shard_grad_samples"
    ),
    _with_and_without_checkpointing("V2", *PRIVATE, "--privacy.gradient_method=grad_sample"),
]
_WITHOUT_AC = ("--activation_checkpoint.mode=none",)
_MICROBATCH, _GRAD_SAMPLE, _GHOST = (
    (*PRIVATE, f"--privacy.gradient_method={method}", *_WITHOUT_AC)
    for method in ("microbatch", "grad_sample", "ghost")
)
_OPACUS = [
    # `microbatch` only because a configuration must name a method: Opacus brings its own.
    Arm(f"Opacus {kind}", _MICROBATCH, opacus=kind)
    for kind in ("hooks", "ghost")
]
_LORA = [
    Arm(name + ADAPTED, (*overrides, "--lora.rank=8"), adapted=True)
    for name, overrides in (
        ("non-DP", (*NOT_PRIVATE, *_WITHOUT_AC)),
        ("microbatch", _MICROBATCH),
        ("V2", _GRAD_SAMPLE),
    )
]
_OPTIONS = [
    *_LORA,
    # What our modules make of TorchTitan, apart from privacy: `worker.stock_modules`.
    Arm(
        "TorchTitan's modules",
        (
            *NOT_PRIVATE,
            *_WITHOUT_AC,
            "--training.loss_chunk_tokens=0",
            "--training.feed_forward_chunk=0",
            "--parallelism.no-keep_weights_gathered",
        ),
        stock=True,
    ),
    Arm("ghost", _GHOST),
    Arm("ghost two passes", (*_GHOST, "--privacy.ghost_passes=two")),
    Arm("microbatch + bands", (*_MICROBATCH, "--privacy.noise=banded", "--privacy.bands=16")),
]
ARMS = {arm.name: arm for pair in zip(*_BOTH_WAYS, strict=True) for arm in pair} | {
    arm.name: arm for arm in [*_OPACUS, *_OPTIONS]
}
ALIASES = {"V3": "V2" + CHECKPOINTED}
LABELS = {"V2" + CHECKPOINTED: "V3 (V2 + AC)"}  # as the paper names it

# Without context parallelism V1 has nothing that V2 would shard.
ON_ONE_PROCESS = ["non-DP", "microbatch", "V2", "Opacus hooks", "Opacus ghost"]


def label(name: str) -> str:
    """An arm's name in tables."""
    return LABELS.get(name, name)


def choose(names: str | None, devices: int) -> list[Arm]:
    """The arms to run, baselines included.

    Args:
        names: comma-separated, or None for all of the paper's and Opacus' that run on `devices`.

    Raises:
        ValueError: an unknown name.
    """
    if names is None:
        usual = [arm for arm in ARMS.values() if arm not in _OPTIONS]
        return [arm for arm in usual if devices == 1 or arm.opacus is None]
    asked = [ALIASES.get(name.strip(), name.strip()) for name in names.split(",")]
    for name in asked:
        if name not in ARMS:
            raise ValueError(f"--arms {name}: unknown; choose from {', '.join(ARMS)}, V3")
    wanted = {*asked, *(ARMS[name].baseline for name in asked)}
    return [arm for name, arm in ARMS.items() if name in wanted]


@dataclass(frozen=True)
class Setting:
    """What all arms of one row share."""

    config_file: str
    overrides: tuple[str, ...]  # the user's, and the table's own
    devices: int
    data_parallel: int  # ranks that hold different records
    seq_len: int
    local_batch_size: int
    microbatches: int

    @property
    def records(self) -> int:
        """In a step, over all ranks."""
        return self.microbatches * self.local_batch_size * self.data_parallel

    @property
    def tokens(self) -> int:
        """In a step, over all ranks."""
        return self.records * self.seq_len

    def arguments(self, arm: Arm, folder: str) -> list[str]:
        """The command line of `arm`, for `config.load.load_config`; without outputs."""
        return [
            *("--job.config_file", self.config_file),
            *self.overrides,
            f"--training.seq_len={self.seq_len}",
            f"--training.local_batch_size={self.local_batch_size}",
            f"--training.global_batch_size={self.records}",
            "--training.steps=1000",
            "--checkpoint.no-enable",
            "--validation.no-enable",
            "--data.no-length_buckets",  # the baseline pads to T: all arms do equal work
            "--metrics.no-enable-tensorboard",
            "--metrics.log_freq=1000000",
            f"--job.dump_folder={folder}/{arm.name.replace(' ', '_')}",
            *arm.overrides,
        ]

    def __str__(self) -> str:
        plural = "es" if self.devices > 1 else ""
        return f"MBS {self.local_batch_size}, T {self.seq_len}, {self.devices} process{plural}"
