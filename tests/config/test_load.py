"""A mistake in the input is one line on stderr that names the key, exit code 2, and no trace."""

import dataclasses
import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import tokenizers

import torchtitan_dp.plan.__main__ as plan
from tests.processes import forks
from tests.processes.runs import CONFIG, ROOT, arguments, write_records
from torchtitan_dp.config.load import RUN_CONFIG_FILE, load_config, read_config, write_config

RECORDS = 24


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path):
    return write_records(tmp_path / "data", RECORDS)


def refused(tmp_path, data, capsys, *overrides, world_size=2):
    """The one line that the plan says to a bad command line."""
    with pytest.raises(SystemExit) as stop:
        plan.main([*arguments(tmp_path / "out", data, *overrides), f"--world_size={world_size}"])
    output = capsys.readouterr()
    assert stop.value.code == 2
    assert output.out == ""
    announced = "not private: tokenizing "  # the records, whose number a mistake may be about
    lines = [line for line in output.err.splitlines() if not line.startswith(announced)]
    assert len(lines) == 1, output.err
    assert lines[0].startswith("error: ")
    assert not (tmp_path / "out").exists()
    return lines[0].removeprefix("error: ").rstrip()


def accepted(tmp_path, data, capsys, *overrides, world_size=2):
    """What the plan says to a good command line."""
    plan.main([*arguments(tmp_path / "out", data, *overrides), f"--world_size={world_size}"])
    return capsys.readouterr().err


# Each: the overrides; what the line must name.
BAD = {
    "code by configuration": (["--experimental.custom_import=antigravity"], "runs no code here"),
    "no delta": (["--privacy.delta=None"], "privacy.delta is not set"),
    "delta 0": (["--privacy.delta=0"], "privacy.delta = 0.0"),
    "delta 1": (["--privacy.delta=1"], "privacy.delta = 1.0"),
    "delta nan": (["--privacy.delta=nan"], "privacy.delta = nan"),
    "sigma and epsilon": (["--privacy.noise_multiplier=1"], "both are set"),
    "neither": (["--privacy.target_epsilon=None"], "neither is set"),
    "epsilon unreachable": (
        ["--privacy.target_epsilon=1e-9", "--privacy.delta=1e-12"],
        "privacy.target_epsilon = 1e-09",
    ),
    "epsilon negative": (["--privacy.target_epsilon=-1"], "privacy.target_epsilon = -1.0"),
    "epsilon nan": (["--privacy.target_epsilon=nan"], "privacy.target_epsilon = nan"),
    "sigma negative": (
        ["--privacy.target_epsilon=None", "--privacy.noise_multiplier=-1"],
        "privacy.noise_multiplier = -1.0",
    ),
    "sigma nan": (
        ["--privacy.target_epsilon=None", "--privacy.noise_multiplier=nan"],
        "privacy.noise_multiplier = nan",
    ),
    "q above 1, by the batch": (
        [f"--training.global_batch_size={RECORDS + 1}"],
        f"training.global_batch_size = {RECORDS + 1}",
    ),
    "q above 1": (["--privacy.sample_rate=1.5"], "privacy.sample_rate = 1.5"),
    "q 0": (["--privacy.sample_rate=0"], "privacy.sample_rate = 0.0"),
    "no batch size": (["--training.global_batch_size=-1"], "training.global_batch_size = -1"),
    "no clipping norm": (["--privacy.max_grad_norm=0"], "privacy.max_grad_norm = 0.0"),
    "infinite clipping norm": (["--privacy.max_grad_norm=inf"], "privacy.max_grad_norm = inf"),
    "no microbatch": (["--training.local_batch_size=0"], "training.local_batch_size = 0"),
    "no steps": (["--training.steps=0"], "training.steps = 0"),
    "seq_len": (["--training.seq_len=30"], "training.seq_len = 30"),
    "seq_len 0": (["--training.seq_len=0"], "training.seq_len = 0"),
    "data missing": (["--training.dataset_path=/nowhere"], "training.dataset_path = '/nowhere'"),
    "glob of nothing": (["--training.dataset_path=/usr/*.nothing"], "training.dataset_path = '/u"),
    "no data": (["--training.dataset_path="], "training.dataset_path is not set"),
    "data format": (["--training.dataset=tar"], "training.dataset = 'tar'"),
    "jsonl of none": (["--training.dataset=jsonl"], "training.dataset_path = "),
    "all held out": (["--data.heldout_fraction=1"], "data.heldout_fraction = 1.0"),
    "next to all held out": (["--data.heldout_fraction=0.9999999"], "data.heldout_fraction = 0.99"),
    "nothing held out": (["--validation.enable"], "data.heldout_fraction = 0"),
    "a delta that publishes a held-out record": (
        [
            *("--validation.enable", "--data.heldout_fraction=0.3"),
            *("--validation.publish_epsilon=1", "--validation.publish_delta=0.5"),
        ],
        "validation.publish_delta = 0.5: at least 1 / number of held-out records",
    ),
    "next to nothing held out": (
        ["--validation.enable", "--data.heldout_fraction=1e-9"],
        "data.heldout_fraction = 1e-09",
    ),
    "units of text": (["--data.unit_field=user"], "data.unit_field = 'user'"),
    "units without a folder": (["--data.unit_field=folder"], "data.unit_field = 'folder'"),
    "choice without units": (["--data.unit_sampling=random"], "data.unit_sampling = 'random'"),
    "prompts of text": (["--data.prompt_field=question"], "data.prompt_field = 'question'"),
    "a prompt without a name": (["--data.prompt_field="], "data.prompt_field = ''"),
    "an answer that is its prompt": (["--data.prompt_field=text"], "data.prompt_field = 'text'"),
    "chats without a template": (["--data.messages_field=chat"], "data.messages_field = 'chat'"),
    "chats and prompts": (
        ["--data.messages_field=chat", "--data.prompt_field=question"],
        "data.messages_field = 'chat'",
    ),
    "windows of prompts": (
        ["--data.prompt_field=question", "--data.long_records=window"],
        "data.long_records = 'window'",
    ),
    "no windows": (["--data.windows_per_draw=0"], "data.windows_per_draw = 0"),
    "windows of heads": (["--data.windows_per_draw=2"], "data.windows_per_draw = 2"),
    "windows without privacy": (
        ["--data.windows_per_draw=2", "--data.long_records=window", "--privacy.no-enable"],
        "data.windows_per_draw = 2",
    ),
    "windows in one backward pass": (
        [
            *("--data.windows_per_draw=2", "--data.long_records=window"),
            "--training.local_batch_size=2",
        ],
        "data.windows_per_draw = 2: privacy.gradient_method = 'grad_sample'",
    ),
    "samples compared": (
        ["--data.verify_records=drawn"],
        "data.verify_records = 'drawn': removed; omit it: all files are read and hashed",
    ),
    "adaptive segments": (
        ["--privacy.new_segment=adaptive"],
        "privacy.new_segment = 'adaptive': removed; set it to 'planned' if the change was fixed",
    ),
    "a token cache on disk": (["--data.no-token_cache"], "data.token_cache: removed, since"),
    "its size": (["--data.token_cache_gib=3"], "data.token_cache_gib: removed, since token ids"),
    "tokenizer missing": (["--model.hf_assets_path=/nowhere"], "model.hf_assets_path = '/nowhere'"),
    "flavor": (["--model.flavor=9B"], "9B"),
    "model": (["--model.name=llama9"], "llama9"),
    "degrees": (["--parallelism.context_parallel_degree=3"], "context_parallel_degree 3"),
    "degree -2": (
        ["--parallelism.context_parallel_degree=-2"],
        "parallelism.context_parallel_degree = -2",
    ),
    "tensor parallel": (
        ["--parallelism.tensor_parallel_degree=2"],
        "parallelism.tensor_parallel_degree = 2",
    ),
    "pipeline parallel": (
        ["--parallelism.pipeline_parallel_degree=2"],
        "parallelism.pipeline_parallel_degree = 2",
    ),
    "load balancer": (
        ["--parallelism.context_parallel_load_balancer=ptrr"],
        "parallelism.context_parallel_load_balancer = 'ptrr'",
    ),
    "float8": (["--model.converters=quantize.linear.float8"], "model.converters"),
    "optimizer in backward": (
        ["--optimizer.early_step_in_backward"],
        "optimizer.early_step_in_backward = true",
    ),
    "a norm that fp32 cannot clip to": (
        ["--privacy.max_grad_norm=1e-12"],
        "privacy.max_grad_norm = 1e-12",
    ),
    "a checkpoint without its ledger": (
        ["--checkpoint.last_save_model_only"],
        "checkpoint.last_save_model_only = true",
    ),
    "checkpoints out of sight": (["--checkpoint.folder=a/b"], "checkpoint.folder = 'a/b'"),
    "another run's ledger taken over": (
        ["--checkpoint.initial_load_path=.", "--checkpoint.no-initial_load_model_only"],
        "checkpoint.initial_load_model_only = false",
    ),
    "a writer that outlives the run": (
        ["--checkpoint.async_mode=async_with_pinned_mem"],
        "checkpoint.async_mode = 'async_with_pinned_mem'",
    ),
    "second clip": (["--training.max_norm=1"], "training.max_norm = 1"),
    "bf16 weights": (["--training.dtype=bfloat16"], "training.dtype = 'bfloat16'"),
    "cpu offload": (["--training.enable_cpu_offload"], "training.enable_cpu_offload = true"),
    "fault tolerance": (["--fault_tolerance.enable"], "fault_tolerance.enable = true"),
    "gdp": (["--privacy.accountant=gdp"], "privacy.accountant"),  # hazard 37: not offered
    "compiled grad_sample, operations chosen": (
        [
            *("--privacy.gradient_method=grad_sample", "--compile.enable"),
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.selective_ac_option=op",
        ],
        "activation_checkpoint.selective_ac_option = 'op'",
    ),
    "compiled grad_sample, budget": (
        [
            *("--privacy.gradient_method=grad_sample", "--compile.enable"),
            "--activation_checkpoint.mode=memory_budget",
        ],
        "activation_checkpoint.mode = 'memory_budget'",
    ),
    "scaled loss": (["--training.loss_scale=1024"], "training.loss_scale = 1024.0"),
    "estimated norms by another accountant": (
        [
            "--privacy.gradient_method=randomized",
            "--privacy.underestimates=accounted",
            "--privacy.accountant=rdp",
        ],
        "privacy.accountant = 'rdp'",
    ),
    "two backward passes over recomputed operations": (
        [
            *("--privacy.gradient_method=ghost", "--privacy.ghost_passes=two"),
            *("--activation_checkpoint.mode=selective",),
            *("--activation_checkpoint.selective_ac_option=op",),
        ],
        "privacy.ghost_passes = 'two'",
    ),
    "two backward passes, compiled": (
        [
            *("--privacy.gradient_method=ghost", "--privacy.ghost_passes=two"),
            "--compile.enable",
        ],
        "privacy.ghost_passes = 'two'",
    ),
    "unknown option": (["--privacy.sigma=1"], "--privacy.sigma"),
    "misspelt option": (
        ["--training.seqlen", "512"],
        "--training.seqlen: unknown option; did you mean --training.seq_len?",
    ),
    "part of a name": (["--privacy.epsilon=8"], "did you mean --privacy.target_epsilon?"),
    "name without a section": (["--delta=1"], "--delta: unknown option; "),
    "unknown section": (["--dp.sigma=1"], "--dp.sigma"),
    "section of others": (["--dp.delta=1e-5"], "did you mean --privacy.delta?"),
    "section of PEFT": (["--peft.r=8"], "did you mean --lora.rank?"),
    "key of another section": (["--training.lr=1"], "did you mean --optimizer.lr?"),
    "section for a key": (["--data", "a"], "it is a section, whose keys are written --data.key"),
    "stray word": (["stray"], "stray"),
    "list of words": (
        ["--lora.targets", "wq", "wv"],
        "--lora.targets … wv: a list is one word with commas; write --lora.targets a,b",
    ),
    "value of a switch": (
        ["--privacy.secure_noise", "true"],
        "write --privacy.secure_noise or --privacy.no-secure_noise",
    ),
    "assigned switch": (["--privacy.secure-noise=true"], "switch without a value"),
    "wrong type": (["--training.steps=many"], "training.steps = 'many': must be a whole number"),
    "no number": (
        ["--privacy.target_epsilon=eight"],
        "privacy.target_epsilon = 'eight': must be a number",
    ),
    "no choice": (
        ["--data.on-undecodable=skip"],
        "data.on_undecodable = 'skip': must be one of 'empty', 'error'",
    ),
    "value missing": (["--training.steps"], "--training.steps: its value is missing; give a whole"),
    "option for a value": (["--training.steps", "--privacy.enable"], "its value is missing"),
    "config missing": (["--job.config_file=/nowhere.toml"], "job.config_file = '/nowhere.toml'"),
}


@pytest.mark.parametrize("overrides, named", BAD.values(), ids=BAD.keys())
def test_bad_input(tmp_path, data, capsys, overrides, named):
    line = refused(tmp_path, data, capsys, *overrides)
    assert named in line
    assert "helptext" not in line  # TorchTitan's parser sends to a help of another program
    assert "---" not in line
    assert "<class" not in line


def test_a_degree_of_0(tmp_path, data, capsys):
    key = "parallelism.data_parallel_replicate_degree"
    assert f"{key} = 0" in refused(tmp_path, data, capsys, f"--{key}=0")


def test_good_input(tmp_path, data, capsys):
    """The command line that the bad ones differ from."""
    said = accepted(tmp_path, data, capsys)
    assert "plan: epsilon = " in said
    assert "error" not in said


def test_the_line_says_what_would_do(tmp_path, data, capsys):
    line = refused(tmp_path, data, capsys, "--training.seq_len=102", world_size=4)
    assert "multiple of 2 x context_parallel_degree = 8" in line
    assert "try 96 or 104" in line


def test_an_empty_data_folder(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    line = refused(tmp_path, tmp_path / "empty", capsys)
    assert "training.dataset_path = " in line


def test_delta_of_a_record_is_refused(tmp_path, data, capsys):
    with pytest.raises(SystemExit) as stop:
        accepted(tmp_path, data, capsys, f"--privacy.delta={1 / RECORDS}")
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "privacy.delta = 0.0416667: at least 1 / number of training records" in said
    said = accepted(tmp_path, data, capsys, f"--privacy.delta={0.9 / RECORDS}")
    assert "warning: privacy.delta = 0.0375: above a tenth of 1 / number of training" in said
    said = accepted(tmp_path, data, capsys, f"--privacy.delta={0.1 / RECORDS}")
    assert "privacy.delta" not in said


@pytest.mark.parametrize(
    "override", ["--privacy.debug_seed=1", "--privacy.noise_multiplier=0"], ids=["seed", "sigma 0"]
)
def test_not_private_is_a_warning(tmp_path, data, capsys, override):
    unset = ["--privacy.target_epsilon=None"] if "noise" in override else []
    said = accepted(tmp_path, data, capsys, *unset, override)
    assert f"warning: {override.removeprefix('--').split('=')[0]}" in said
    assert "plan: NOT private at" in said
    assert "plan: epsilon" not in said


def test_undecodable_records(tmp_path, data, capsys):
    (data / "binary").write_bytes(b"\xff\xfe\x00\xff")
    line = refused(tmp_path, data, capsys, "--data.on_undecodable=error")
    assert "data.on_undecodable = 'error': 1 of 25 records" in line
    assert "25 training records" in accepted(tmp_path, data, capsys)  # by default it stays


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path, data, capsys):
    words = {f"w{i}": i for i in range(265)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    assets = tmp_path / "assets"
    assets.mkdir()
    tokenizers.Tokenizer(model).save(str(assets / "tokenizer.json"))
    line = refused(tmp_path, data, capsys, f"--model.hf_assets_path={assets}")
    assert "model.hf_assets_path = " in line
    assert "265 tokens, more than the 264 of model.flavor = 'debug'" in line


@pytest.mark.parametrize(
    "fields, sampling, long_records",
    [
        ((), "concat", "head"),
        (("--data.unit_field=who",), "concat", "window"),
        (("--data.prompt_field=q",), "concat", "head"),
        (("--data.unit_field=who", "--data.prompt_field=q"), "random", "head"),
        (("--data.unit_field=who", "--data.messages_field=m"), "random", "head"),
        (("--data.unit_field=who", "--data.unit_sampling=random"), "random", "window"),
        (("--data.unit_field=who", "--data.long_records=head"), "concat", "head"),
    ],
)
def test_units_are_read_whole_by_default(tmp_path, data, fields, sampling, long_records):
    config = load_config(arguments(tmp_path / "out", data, *fields), 2)
    assert (config.data.unit_sampling, config.data.long_records) == (sampling, long_records)


@pytest.mark.parametrize(
    "text, named",
    [
        ("[privacy]\ndelat = 1e-5", "privacy.delat: unknown key"),
        ("[privcay]\ndelta = 1e-5", "privcay: unknown key"),
        ("[peft]\nr = 8", "did you mean the section [lora]?"),
        ("[dp]\ndelta = 1e-5", "did you mean the section [privacy]?"),
        ("[privacy]\ndelta = '1e-5'", "privacy.delta = '1e-5'"),
        ("[privacy]\nenable = 1", "privacy.enable = 1"),
        ("[privacy]\naccountant = 'gdp'", "privacy.accountant = 'gdp'"),
        ("[training]\nsteps = 4.5", "training.steps = 4.5"),
        ("[training]\nsteps = true", "training.steps = True"),
        ("[training]\ndataset_path = 3", "training.dataset_path = 3"),
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


def test_a_misspelt_key_gets_a_hint(tmp_path, data, capsys):
    path = tmp_path / "bad.toml"
    path.write_text("[privacy]\nnoise_multiplyer = 1.0")
    line = refused(tmp_path, data, capsys, f"--job.config_file={path}")
    assert "did you mean privacy.noise_multiplier?" in line


def test_a_folder_that_is_a_file(tmp_path, data, capsys):
    (tmp_path / "file").write_text("")
    line = refused(tmp_path, data, capsys, f"--job.dump_folder={tmp_path / 'file'}")
    assert f"job.dump_folder = '{tmp_path / 'file'}'" in line


@pytest.mark.parametrize("value", ["two", "0", "-1", ""])
def test_a_world_size_that_is_none(tmp_path, data, capsys, monkeypatch, value):
    monkeypatch.setenv("NGPU", value)
    with pytest.raises(SystemExit) as stop:
        plan.main(arguments(tmp_path / "out", data))
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "NGPU" in line
    assert not (tmp_path / "out").exists()


def test_a_toml_names_no_code_to_run(tmp_path, data, monkeypatch):
    """TorchTitan imports `job.custom_config_module`; here it is always ours."""
    (tmp_path / "malicious.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    text = CONFIG.read_text()
    path = tmp_path / "malicious.toml"
    path.write_text(text.replace('"torchtitan_dp.config"', '"malicious"'))
    assert "malicious" in path.read_text()
    config = load_config(arguments(tmp_path, data, f"--job.config_file={path}"), 2)
    assert config.job.custom_config_module == "torchtitan_dp.config"


def test_command_line_over_toml_over_defaults(tmp_path, data):
    config = load_config(arguments(tmp_path, data, "--training.steps=7"), 2)
    assert config.training.steps == 7  # the TOML says 40
    assert config.optimizer.lr == 1.2e-2  # the TOML's; TorchTitan's is 8e-4
    assert config.training.max_norm == 0  # ours; TorchTitan's is 1
    assert config.parallelism.context_parallel_degree == 2  # -1 in the TOML: all of them


def test_a_removed_key_is_refused_in_a_toml_and_left_out_of_a_run_that_was_kept(tmp_path, data):
    toml = tmp_path / "old.toml"
    for line in ("token_cache = true", "token_cache_gib = 64.0", 'verify_records = "drawn"'):
        toml.write_text(CONFIG.read_text().replace("[data]", f"[data]\n{line}"))
        with pytest.raises(ValueError, match=f"data.{line.split()[0]}.* in .*old.toml: removed"):
            load_config([f"--job.config_file={toml}"], 2)
    config = load_config(arguments(tmp_path, data), 1)
    write_config(config)
    kept = tmp_path / RUN_CONFIG_FILE
    values = json.loads(kept.read_text())
    values["data"] |= {"token_cache": True, "token_cache_gib": 64.0}
    kept.write_text(json.dumps(values))
    assert read_config(str(tmp_path)).data == config.data


def test_a_toml_of_a_windows_editor(tmp_path):
    """It begins with a byte order mark, and lines end in two characters."""
    toml = tmp_path / "marked.toml"
    toml.write_bytes(CONFIG.read_text().replace("\n", "\r\n").encode("utf-8-sig"))
    marked, plain = (load_config([f"--job.config_file={path}"], 1) for path in (toml, CONFIG))
    marked.job.config_file = plain.job.config_file
    assert dataclasses.asdict(marked) == dataclasses.asdict(plain)


PATHS = (
    *("job.dump_folder", "model.hf_assets_path", "training.dataset_path"),
    *("checkpoint.initial_load_path", "metrics.save_tb_folder", "profiling.save_traces_folder"),
)


def test_paths_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    """A shell does not replace `~` within `--key=~/x`, and nobody does so in a TOML."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.toml").write_text(CONFIG.read_text())
    given = [
        "--job.config_file=~/my.toml",
        "--checkpoint.enable",
        *(f"--{key}=~/{key}" for key in PATHS),
    ]
    config = load_config(given, 1)
    assert config.optimizer.lr == 1.2e-2  # of the TOML
    for key in PATHS:
        section, name = key.split(".")
        assert getattr(getattr(config, section), name) == f"{tmp_path}/{key}"


def test_keys_that_changed_since_the_last_start_are_named(tmp_path, data):
    def lines(*overrides):
        return write_config(load_config(arguments(tmp_path, data, *overrides), 1))

    assert lines() == []
    assert lines() == []
    assert lines("--optimizer.lr=7e-5", "--job.description=other") == [
        "optimizer.lr = 7e-05 from here on: 0.012 at the last start"
    ]
    assert lines("--optimizer.lr=7e-5") == []
    kept = tmp_path / RUN_CONFIG_FILE
    kept.write_text("{")
    (line,) = lines()
    assert "which keys changed is not known" in line
    assert lines() == []


def test_dashes_are_underscores_and_equals_is_space(tmp_path, data):
    given = ["--job.config-file", str(CONFIG), "--training.global-batch-size", "5"]
    assert load_config(given, 2).training.global_batch_size == 5


def test_a_signal_that_ends_the_process_while_it_parses_is_no_mistake(data, tmp_path):
    """The launcher's handler raises wherever the plan is."""
    stop = SystemExit(75)
    with (
        mock.patch("torchtitan_dp.config.load.ConfigManager.parse_args", side_effect=stop),
        pytest.raises(SystemExit) as ended,
    ):
        load_config(arguments(tmp_path / "out", data), 1)
    assert ended.value is stop


def run_train(*overrides, **env):
    forks.need()
    return subprocess.run(
        [str(ROOT / "run_train.sh"), *overrides],
        env={**os.environ, "TORCHTITAN_DP_PYTHON": sys.executable, "NGPU": "2", **env},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_run_train_exits_with_2_before_anything_starts(tmp_path, data):
    ended = run_train(*arguments(tmp_path / "out", data, "--privacy.delta=None"))
    assert ended.returncode == 2
    assert ended.stdout == ""
    told, line = ended.stderr.splitlines()
    assert told == "checking the configuration and the data…"
    assert line.startswith("error: privacy.delta is not set")
    assert not (tmp_path / "out").exists()


def test_run_train_wants_a_number_of_processes():
    ended = run_train(NGPU="two")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "NGPU" in line


def test_a_python_with_another_torch_is_refused_in_one_line(tmp_path):
    """A cluster's own Python is taken as it is, but for the two packages that all hangs on."""
    metadata = tmp_path / "torch-2.9.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: torch\nVersion: 2.9.0\n")
    env = {**os.environ, "TORCHTITAN_DP_PYTHON": sys.executable}
    command = ["bash", str(ROOT / "scripts/setup.sh")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    env["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"setup.sh: TORCHTITAN_DP_PYTHON={sys.executable}: torch is 2.9.0"
    )
    assert len(done.stderr.splitlines()) == 1
