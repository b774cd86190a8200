"""Faults of memory that two streams use: row 29."""

from tests.hazards.mutants.table import Mutant

MUTANTS = [
    Mutant(
        29,
        "a gradient in memory that the next may have early",
        "gradients/fsdp.py",
        "            with streams.stream(self._home):\n                self._output",
        "            if True:\n                self._output",
        ("gradients/test_streams.py::test_streams_leave_nothing_open[(1, 1, 2)]",),
    ),
    Mutant(
        29,
        "an offloaded input overwritten while it is copied",
        "distributed/offload.py",
        "current_stream().wait_event(done)",
        "current_stream()",
        ("distributed/test_offload.py::test_streams_leave_nothing_open",),
        quick=True,
    ),
]
