"""The files of `deploy/` agree with the package: versions, Python, commands, exit codes."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from torchtitan_dp import __main__ as command
from torchtitan_dp.launch import EXIT_STOPPED

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PROJECT = (ROOT / "pyproject.toml").read_text()
MISTAKE = 2  # the exit code of a wrong configuration
(VERSION,) = re.findall(r'^version = "(.*)"$', PROJECT, re.M)


@pytest.fixture(scope="module")
def jobset() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "kubernetes.yaml").read_text())


@pytest.fixture(scope="module")
def job(jobset: dict[str, Any]) -> dict[str, Any]:
    (job,) = jobset["spec"]["replicatedJobs"]
    return job["template"]["spec"]


@pytest.fixture(scope="module")
def pod(job: dict[str, Any]) -> dict[str, Any]:
    return job["template"]["spec"]


@pytest.mark.parametrize("file", ["deploy/Dockerfile", "deploy/apptainer.def", "docs/install.md"])
def test_one_python_that_ci_tests(file: str) -> None:
    found = set(re.findall(r"python:([\d.]+)-bookworm", (ROOT / file).read_text()))
    tested = re.search(r"python: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text())
    assert found == {"3.12"}
    assert tested is not None
    assert '"3.12"' in tested[1]


@pytest.mark.parametrize("file", ["Dockerfile", "apptainer.def", "kubernetes.yaml"])
def test_the_version_is_the_package_s(file: str) -> None:
    assert set(re.findall(r"\b\d+\.\d+\.\d+\b", (DEPLOY / file).read_text())) == {VERSION}


def test_the_image_copies_only_what_the_wheel_is_built_from() -> None:
    """Never `COPY .`, which would take outputs and records along."""
    copies = re.findall(r"^COPY (.*) \S+$", (DEPLOY / "Dockerfile").read_text(), re.M)
    names = {name for line in copies for name in line.split()} - {"wheel[s]"}
    built_from = "LICENSE README.md constraints.txt pyproject.toml torchtitan_dp train_configs"
    assert names == set(built_from.split())
    assert all((ROOT / name).exists() for name in names)


def test_exit_codes_decide_about_restarts(jobset: dict[str, Any], job: dict[str, Any]) -> None:
    (failing,) = job["podFailurePolicy"]["rules"]
    assert failing["action"] == "FailJob"
    assert set(failing["onExitCodes"]["values"]) == {MISTAKE, EXIT_STOPPED}
    assert job["backoffLimit"] == 0
    rules = jobset["spec"]["failurePolicy"]["rules"]
    actions = {MISTAKE: "FailJobSet", EXIT_STOPPED: "RestartJobSetAndIgnoreMaxRestarts"}
    for code, action in actions.items():
        # Kubernetes' message. JobSet takes the first rule that matches.
        message = f"Container x for pod y/z failed with exit code {code} matching FailJob rule at 0"
        matching = [
            rule["action"]
            for rule in rules
            if any(re.search(p, message) for p in rule.get("onJobFailureMessagePatterns", [""]))
        ]
        assert matching[0] == action
    for rule in rules:
        assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
        # As JobSet's webhook has it, which no schema does.
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])


def test_the_commands_are_the_package_s(
    jobset: dict[str, Any], job: dict[str, Any], pod: dict[str, Any]
) -> None:
    (plan,), (train,) = pod["initContainers"], pod["containers"]
    assert plan["args"][0] in command._COMMANDS
    assert train["command"] == ["python", "-m", "torchtitan_dp.launch"]
    assert "NODE_RANK" in {variable["name"] for variable in train["env"]}
    args = [arg.replace("$(NODE_RANK)", "1") for arg in train["args"]]
    options = get_args_parser().parse_args(args)
    gpus = train["resources"]["limits"]["nvidia.com/gpu"]
    nodes = job["parallelism"]
    assert (options.nnodes, options.nproc_per_node) == (str(nodes), str(gpus))
    assert job["completions"] == nodes
    assert plan["args"][1:] == ["/work/my.toml", "--world_size", str(nodes * gpus)]
    assert (options.module, options.training_script) == (True, "torchtitan_dp.train")
    assert options.training_script_args == ["--job.config_file=/work/my.toml"]
    # The first pod's name in DNS: JobSet, replicated job, job, pod; then the JobSet's subdomain.
    name, replicated = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    assert options.rdzv_endpoint == f"{name}-{replicated}-0-0.{name}:29500"


def test_a_pod_has_no_rights_and_time_to_save(pod: dict[str, Any]) -> None:
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy needs
    assert pod["terminationGracePeriodSeconds"] >= 600
    assert pod["securityContext"]["runAsNonRoot"]
    uid = pod["securityContext"]["runAsUser"]
    assert f"USER {uid}:{uid}\n" in (DEPLOY / "Dockerfile").read_text()
    for container in (*pod["initContainers"], *pod["containers"]):
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    (shm,) = (volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
