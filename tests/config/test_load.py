"""A mistake in the input is one line on stderr that names the key, exit code 2, and no trace."""

import sys

import pytest
import tokenizers

import torchtitan_dp.plan.__main__ as plan
from tests.processes import forks
from tests.processes.runs import CONFIG, ROOT, arguments, said, write_records
from torchtitan_dp.config.load import RUN_CONFIG_FILE, fail, load_config, write_config

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def data(tmp_path):
    return write_records(tmp_path / "data")


def plan_of(tmp_path, data, overrides, world_size=2):
    plan.main([*arguments(tmp_path / "out", data, *overrides), f"--world_size={world_size}"])


def refused(tmp_path, data, capsys, *overrides, world_size=2):
    """The one line that the plan says to a bad command line."""
    with pytest.raises(SystemExit) as stop:
        plan_of(tmp_path, data, overrides, world_size)
    output = capsys.readouterr()
    assert (stop.value.code, output.out) == (2, "")
    announced = "not private: tokenizing "  # the records, whose number a mistake may be about
    lines = [line for line in output.err.splitlines() if not line.startswith(announced)]
    assert lines
    assert all(line.startswith("error: ") for line in lines)
    assert not (tmp_path / "out").exists()
    return "\n".join(line.removeprefix("error: ").rstrip() for line in lines)


# Overrides, and what the line must contain; by default the key of the first, and " = ".
BAD = """
experimental.custom_import=antigravity → runs no code here
privacy.delta=None → privacy.delta is not set: set
privacy.delta=1
privacy.noise_multiplier=1 → privacy.target_epsilon = 8.0: privacy.noise_multiplier = 1.0 is set as
privacy.target_epsilon=None → privacy.target_epsilon is not set: give one (8.0, say), or
training.global_batch_size=25 → training.global_batch_size = 25
privacy.sample_rate=1.5
training.global_batch_size=-1 → set the expected number of records
training.seq_len=31
training.seq_len=0 → must be at least 1
training.dataset_path=/nowhere
training.dataset_path= → training.dataset_path is not set
training.dataset=jsonl → training.dataset_path =
data.heldout_fraction=1e-9 validation.enable
validation.enable → data.heldout_fraction = 0.0: validation.enable = true needs held-out
validation.publish_epsilon=1 → no held-out loss is computed
validation.publish_epsilon=1 validation.enable data.heldout_fraction=.3 privacy.no-enable → \
    only private runs publish it
validation.publish_epsilon=1 validation.enable data.heldout_fraction=.3 privacy.sample_rate=.1 → \
    a public privacy.sample_rate
validation.publish_delta=1e-6 → no held-out loss is published
validation.publish_delta=0.5 validation.publish_epsilon=1 validation.enable \
    data.heldout_fraction=.3 → validation.publish_delta = 0.5: must be below 1 / number of held-out
data.unit_field=folder
data.unit_sampling=random → units of one record
data.prompt_field= → data.prompt_field = '': text has none; use jsonl or omit it
data.prompt_field=text → it is data.text_field
data.messages_field=chat data.prompt_field=question → data.prompt_field is set, too
data.messages_field=chat data.text_field=note → data.text_field is set, too; remove one
data.unit_field=text → it is the field of the text, too; name a field for each
data.prompt_field=question data.long_records=window → data.long_records = 'window': data.prompt
data.windows_per_draw=2 → each unit has one sample
data.windows_per_draw=2 data.long_records=window privacy.no-enable → without privacy no unit
data.windows_per_draw=2 data.long_records=window training.local_batch_size=2 → \
    data.windows_per_draw = 2: needs privacy.gradient_method = 'microbatch'
data.store=OUT/store → lies within job.dump_folder
training.dataset_path=/ → job.dump_folder = 
model.hf_assets_path=/nowhere
model.flavor=9B → 9B
model.name=llama9 → llama9
model.tokenizer_path=x → use model.hf_assets_path
parallelism.context_parallel_degree=3 → context_parallel_degree 3 = 3, but there are 2 processes
parallelism.tensor_parallel_degree=2
lr_scheduler.total_steps=3 → lr_scheduler.total_steps = 3: below training.steps = 4
compile.backend=inducter compile.enable → compile.backend = 'inducter': must be 'inductor', 'aot
optimizer.name=MomentumSGD privacy.no-enable → units of the noise, here 0; use 'AdamW'
checkpoint.folder=a/b
checkpoint.initial_load_path=. → checkpoint.initial_load_in_hf = false: weights of another run
checkpoint.no-initial_load_model_only checkpoint.initial_load_path=. → \
    checkpoint.initial_load_model_only = false: set it to true; to go on
checkpoint.no-initial_load_model_only checkpoint.initial_load_in_hf → folders have a model; set
checkpoint.no-enable checkpoint.initial_load_in_hf → checkpoint.enable = false: no initial weights
checkpoint.async_mode=async_with_pinned_mem → outlive a killed run
checkpoint.async_mode=async_with_pinned_mem ema.enable → changes weights that it copies
ema.enable training.dtype=bfloat16 → averages (ema.enable = true) are of fp32 weights
training.enable_cpu_offload
privacy.bands=4 → only correlated noise has bands
privacy.noise=banded privacy.target_epsilon=None privacy.noise_multiplier=1 → privacy.bands = 'auto'
privacy.noise=banded privacy.secure_noise → privacy.secure_noise = true
privacy.gradient_method=randomized privacy.underestimates=accounted → privacy.accountant = 'rdp'
lora.rank=2 lora.targets=q_proj,q_proj → name each target once
activation_checkpoint.offload_inputs activation_checkpoint.mode=none
training.feed_forward_chunk=16 activation_checkpoint.mode=selective → products of tiles
training.feed_forward_chunk=16 activation_checkpoint.mode=none training.local_batch_size=2 → \
    tiles are for backward passes over one sample
compile.enable activation_checkpoint.mode=selective activation_checkpoint.selective_ac_option=op → \
    activation_checkpoint.selective_ac_option = 'op'
compile.enable privacy.gradient_method=ghost → layers of 'ghost' are not compiled
privacy.gradient_method=ghost privacy.ghost_passes=two activation_checkpoint.mode=selective \
    activation_checkpoint.selective_ac_option=op → PyTorch allows one backward pass
privacy.sigma=1 → --privacy.sigma: unknown option; see the keys of [privacy]
privacy.epsilon=8 → did you mean --privacy.target_epsilon?
training.lr=1 → did you mean --optimizer.lr?
optimizer.learning_rate=1 → did you mean --optimizer.lr?
data a → unknown option; see --help; sections are activation_checkpoint, checkpoint
privacy.secure_noise true → = 'true': it is a switch without a value; write --privacy.secure_noise
privacy.secure-noise=true → write --privacy.secure_noise or --privacy.no-secure_noise
training.steps=many → training.steps = 'many': must be a whole number
data.unit-sampling=skip → data.unit_sampling = 'skip': must be one of 'auto', 'concat', 'random'
training.steps → --training.steps: its value is missing; give a whole
job.config_file=/nowhere.toml
lora.targets q_proj k → 'k': neither
"""
WORDS = {"a", "true", "q_proj", "k"}  # not options


@pytest.mark.parametrize("case", BAD.strip().splitlines(), ids=lambda case: case.partition("→")[0])
def test_bad_input(tmp_path, data, capsys, case):
    given, arrow, named = case.partition("→")
    overrides = given.replace("OUT", str(tmp_path / "out")).split()
    key = overrides[0].partition("=")[0].replace("no-", "")
    options = [word if word in WORDS else f"--{word}" for word in overrides]
    assert (named.strip() if arrow else f"{key} = ") in refused(tmp_path, data, capsys, *options)


def test_several_mistakes_are_one_answer(tmp_path, data, capsys):
    """Of the command line's keys, types and ranges; and, where these hold, of each table."""
    options = ("--privacy.max_grad_nrm=1", "--training.stepz", "9", "--training.seq_len=x")
    asked = refused(
        tmp_path, data, capsys, *options, "--optimizer.beta1=2", "--debug.seed=" + "9" * 20
    )
    assert asked.splitlines() == [
        "--privacy.max_grad_nrm: unknown option; did you mean --privacy.max_grad_norm?",
        "--training.stepz: unknown option; did you mean --training.steps?",
        "training.seq_len = 'x': must be a whole number",
        "optimizer.beta1 = 2.0: must be at least 0 and below 1",
        "debug.seed = 99999999999999999999: must be from 0 to 9223372036854775807",
    ]
    asked = refused(tmp_path, data, capsys, "--validation.enable", "--training.seq_len=31")
    assert [line.split(" ")[0] for line in asked.splitlines()] == [
        "training.seq_len",
        "data.heldout_fraction",
    ]


def test_what_moves_a_cursor_is_escaped(capsys):
    with pytest.raises(SystemExit):
        fail("a\x1b[2Jb\0c")
    assert capsys.readouterr().err == "error: a\\x1b[2Jb\\x00c\n"


def test_a_configuration_is_judged_without_pytorch(tmp_path, data):
    """Importing it takes seconds."""
    forks.need()
    code = "import sys; from torchtitan_dp.config import load; load.load_config(sys.argv[1:], 1)"
    given = [*arguments(tmp_path / "out", data), "--data.no-length_buckets"]
    done = said(sys.executable, "-c", f"{code}; print(*sys.modules)", *given)
    done.check_returncode()
    assert not {"torch", "torchtitan"} & {*done.stdout.split()}


NO_RECORDS = "--training.dataset_path=gone", "training.dataset_path = 'gone' does not exist"
NO_MODEL = "--model.hf_assets_path=gone", "model.hf_assets_path = 'gone': no such folder"
OUT_OF_RANGE = "--training.steps=0", "training.steps = 0: must be at least 1"


@pytest.mark.parametrize(
    ("room", "wrong", "line"),
    [(room, *OUT_OF_RANGE) for room in ("plan", "tune", "audit", "selfcheck")]
    + [("plan", *NO_RECORDS), ("plan", *NO_MODEL)],
)
def test_a_command_answers_before_it_imports_pytorch(room, wrong, line):
    forks.need()
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv[0] = 'x'; "  # an import fails
        f"runpy.run_module('torchtitan_dp.{room}', run_name='__main__', alter_sys=True)"
    )
    needs = ["--epsilon=1", "--try=optimizer.lr=1,2"] if room == "tune" else []
    toml = ["--config" if room == "selfcheck" else "--job.config_file", CONFIG]
    done = said(sys.executable, "-c", code, *map(str, toml), *needs, wrong)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {line}")


@pytest.mark.parametrize(
    "override", ["--privacy.debug_seed=1", "--privacy.noise_multiplier=0"], ids=["seed", "sigma 0"]
)
def test_not_private_is_a_warning(tmp_path, data, capsys, override):
    unset = ["--privacy.target_epsilon=None"] if "noise" in override else []
    plan_of(tmp_path, data, [*unset, override])
    told = "".join(capsys.readouterr())
    assert f"warning: {override.removeprefix('--').split('=')[0]}" in told
    assert "plan: NOT private at" in told
    assert "plan: epsilon" not in told


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path, data, capsys):
    model = tokenizers.models.WordLevel({f"w{i}": i for i in range(265)}, unk_token="w0")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    line = refused(tmp_path, data, capsys, f"--model.hf_assets_path={tmp_path}")
    assert line.startswith("model.hf_assets_path = ")
    assert "265 tokens, more than the 264 of model.flavor = 'debug'" in line


@pytest.mark.parametrize(
    "fields, sampling, long_records",
    [
        ("", "concat", "head"),
        ("--data.unit_field=who", "concat", "window"),
        ("--data.prompt_field=q", "concat", "head"),
        ("--data.unit_field=who --data.prompt_field=q", "random", "head"),
        ("--data.unit_field=who --data.messages_field=m", "random", "head"),
        ("--data.unit_field=who --data.unit_sampling=random", "random", "window"),
        ("--data.unit_field=who --data.long_records=head", "concat", "head"),
    ],
)
def test_units_are_read_whole_by_default(tmp_path, data, fields, sampling, long_records):
    config = load_config(arguments(tmp_path / "out", data, *fields.split()), 2)
    assert (config.data.unit_sampling, config.data.long_records) == (sampling, long_records)


@pytest.mark.parametrize(
    "text, named",
    [
        ("[privacy]\nnoise_multiplyer = 1.0", "did you mean privacy.noise_multiplier?"),
        ("[privcay]\ndelta = 1e-5", "privcay: unknown key"),
        ("[privacy]\ndelta = '1e-5'", "privacy.delta = '1e-5'"),
        ("[privacy]\naccountant = 'gdp'", "privacy.accountant = 'gdp'"),
        ("[training]\nsteps = true", "training.steps = True"),
        ("[model]\nconverters = 'float8'", "model.converters = 'float8'"),
        ("[[privacy]]\ndelta = 1e-5", "privacy = "),
        ("training = 3", "training = 3"),
        ("[privacy\ndelta = 1e-5", "job.config_file = "),
        (b"\xff\xfe", "job.config_file = "),
    ],
)
def test_bad_toml(tmp_path, data, capsys, text, named):
    path = tmp_path / "bad.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    line = refused(tmp_path, data, capsys, f"--job.config_file={path}")
    assert named in line
    assert str(path) in line


def test_a_toml_names_no_code_to_run(tmp_path, data, monkeypatch):
    """TorchTitan imports `job.custom_config_module`; here it is always ours."""
    (tmp_path / "malicious.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "malicious.toml"
    path.write_text(CONFIG.read_text().replace('"torchtitan_dp.config"', '"malicious"'))
    assert "malicious" in path.read_text()
    config = load_config(arguments(tmp_path, data, f"--job.config_file={path}"), 2)
    assert config.job.custom_config_module == "torchtitan_dp.config"


def test_command_line_over_toml_over_defaults(tmp_path, data):
    given = ["--training.steps=7", "--training.global-batch-size", "5"]  # "-" and " " will do too
    config = load_config(arguments(tmp_path, data, *given), 2)
    assert config.training.steps == 7  # the TOML says 40
    assert config.training.global_batch_size == 5
    assert config.optimizer.lr == 1.2e-2  # the TOML's; TorchTitan's is 8e-4
    assert config.training.max_norm == 0  # ours; TorchTitan's is 1
    assert config.parallelism.context_parallel_degree == 2  # -1 in the TOML: all of them


def test_keys_that_changed_since_the_last_start_are_named(tmp_path, data):
    def lines(*overrides):
        return write_config(load_config(arguments(tmp_path, data, *overrides), 1))

    assert lines() == []
    assert lines() == []
    assert lines("--optimizer.lr=7e-5", "--job.description=other") == [
        "optimizer.lr = 7e-05 from here on: 0.012 at the last start"
    ]
    assert lines("--optimizer.lr=7e-5") == []
    (tmp_path / RUN_CONFIG_FILE).write_text("{")
    (line,) = lines()
    assert "which keys changed is not known" in line
    assert lines() == []


def run_train(*overrides, **env):
    forks.need()
    env = {"TORCHTITAN_DP_PYTHON": sys.executable, "NGPU": "2", **env}
    return said(ROOT / "run_train.sh", *overrides, **env)


def test_run_train_exits_with_2_before_anything_starts(tmp_path, data):
    ended = run_train(*arguments(tmp_path / "out", data, "--privacy.delta=None"))
    assert (ended.returncode, ended.stdout) == (2, "")
    told, line = ended.stderr.splitlines()
    assert told == "checking the configuration and the data…"
    assert line.startswith("error: privacy.delta is not set")
    assert not (tmp_path / "out").exists()
    ended = run_train(NGPU="two")
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, "NGPU" in line) == (2, True)
