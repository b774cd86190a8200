"""Faults of memory that is still in use: by another stream (row 29), by a collective (row 67)."""

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
    Mutant(
        67,
        "a layer's sum over cp is read while it runs",
        "gradients/grad_sample.py",
        "shard = pending.wait()",
        "shard = pending._unfinished",
        ("gradients/test_exactness.py::test_every_pair_of_values[grad_sample-(1, 1, 2)]",),
    ),
    Mutant(
        67,
        "an input is freed while it is sent",
        "collectives.py",
        "self._running.append((work, input))",
        "self._running.append((work, None))",
        ("gradients/test_exactness.py::test_every_pair_of_values[grad_sample-(1, 1, 2)]",),
    ),
    Mutant(
        67,
        "a second asynchronous collective that nobody waits for",
        "gradients/clipped_sum.py",
        "dist.all_reduce(squares, group=self.groups.cp)",
        "dist.all_reduce(squares, group=self.groups.cp, async_op=True)",
        ("test_collectives.py::test_row67_every_asynchronous_collective_is_begun_in_one_file",),
        quick=True,
    ),
]
