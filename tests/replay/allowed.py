"""The differences between neighbours that are allowed, and why; docs/privacy.md prints the list."""

import fnmatch
import re

ALLOWED = (
    (
        "the files of the run's folder that are not to be published",
        "they are the owner's: the table of published files names each",
    ),
    (
        "console lines, and ends of lines, labelled not private",
        "losses, gradient norms, counts of records and times are for the owner's eyes",
    ),
    (
        "the clipped sums before noise, by at most C",
        "this is the sensitivity that noise is made for",
    ),
    (
        "the mean of clipped held-out losses before noise, by at most L/n",
        "the same of a published held-out loss, where neighbours differ in a held-out unit",
    ),
    (
        "number and sizes of microbatches and of their collectives, with `data.length_buckets`",
        "they follow from lengths of drawn units, and show on the cluster's network and in timing, "
        "which the guarantee leaves out; without buckets they are equal",
    ),
    (
        "where a clock or a crash cut a run into jobs",
        "steps take as long as their samples are; what is published counts what a start could lose",
    ),
    (
        "the store of tokens, outside the run's folder, and the time and room that preparing it "
        "takes",
        "it holds the records, for their owner; no published file, exit code or setting follows "
        "from it",
    ),
    (
        "the random names of run and starts",
        "they are drawn from the operating system, whatever the records are",
    ),
)
"""(difference, reason)."""

PRIVATE_FILES = (
    *("tb/*", "wandb/*", "mlflow.db", "watch.json", "fault.txt", "run_config.json", "report.html"),
    *("steps_executed.log", "starts.log", "data_fingerprint.private"),
    *("checkpoint.damaged/*", "profile_traces/*", "memory_snapshot/*", "comm_traces/*"),
)
"""Patterns of the files of a run's folder that docs/privacy.md lists as not to be published."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(,\d+)?|\b\d+(\.\d+)? ?(s|seconds|min)\b")
_SPACE = re.compile(r"[\d.]+ GiB are free")  # on a disk that others use, too
_PREFIX = re.compile(r"^\[titan\] TIME - root - [A-Z]+ - ?")
_RANK = re.compile(r"^\[rank\d+\]:")
_LABEL = re.compile(r"(warning \()?not private")


def is_private(path: str) -> bool:
    """Whether a file of the run's folder, by its path there, is not to be published."""
    return any(fnmatch.fnmatch(path, pattern) for pattern in PRIVATE_FILES)


def public_lines(output: str, root: str) -> dict[str, list[str]]:
    """Return the console's lines by process, without their private parts, times and paths."""
    lines: dict[str, list[str]] = {}
    for line in _COLOUR.sub("", output.replace(root, "ROOT")).splitlines():
        process = rank.group() if (rank := _RANK.match(line)) else ""
        line = _SPACE.sub("SPACE", _TIME.sub("TIME", line.removeprefix(process)))
        public, *labelled = _LABEL.split(_PREFIX.sub("", line), maxsplit=1)
        if public.strip() or not labelled:
            lines.setdefault(process, []).append(public)
    return lines
