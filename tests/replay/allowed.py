"""What may differ between neighbours: files not to be published, and private parts of the console.
docs/privacy.md ("What may differ between neighbours") has the whole list, with reasons."""

import fnmatch
import re

PRIVATE_FILES = (
    *("tb/*", "wandb/*", "watch.json", "fault.txt", "run_config.json", "report.html"),
    *("steps_executed.log", "starts.log", "data_fingerprint.private"),
    *("checkpoint.damaged/*", "profile_traces/*", "memory_snapshot/*", "comm_traces/*"),
)
"""Patterns of the files of a run's folder that docs/privacy.md lists as not to be published."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|\b\d+(\.\d+)? ?(s|seconds|min)\b")
_SPACE = re.compile(r"[\d.]+ GiB are free")  # on a disk that others use, too
_PREFIX = re.compile(r"^\d\d \w{3} \d\d:\d\d:\d\d [A-Z]+ ")
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
