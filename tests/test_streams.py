"""The recording streams themselves: each fault that they are there for is found."""

import pytest
import torch

from tests.streams import watched

HERE = "a test"


def use(stream, tensor):
    with torch.cpu.stream(stream):
        return tensor + 1


def in_order(current, side, x):
    side.wait_stream(current)
    use(side, x)
    current.wait_stream(side)


def by_an_event(current, side, x):
    event = current.record_event()
    side.wait_event(event)
    use(side, x)
    current.wait_event(side.record_event())


def used_before_it_is_made(current, side, x):
    use(side, x)
    current.wait_stream(side)


def freed_while_in_use(current, side, x):
    side.wait_stream(current)
    use(side, x)


def written_while_it_is_read(current, side, x):
    side.wait_stream(current)
    x.add_(1)
    use(side, x)
    current.wait_stream(side)


def an_event_too_early(current, side, x):
    side.wait_stream(current)
    event = side.record_event()
    use(side, x)
    current.wait_event(event)


@pytest.mark.parametrize(
    ("case", "found"),
    [
        (in_order, None),
        (by_an_event, None),
        (used_before_it_is_made, "used at once"),
        (freed_while_in_use, "freed while in use"),
        (written_while_it_is_read, "used at once"),
        (an_event_too_early, "freed while in use"),
    ],
)
def test_what_streams_leave_open_is_found(case, found):
    with watched(HERE) as watch:
        current, side = torch.cpu.current_stream(), torch.cpu.Stream()
        x = torch.zeros(4)
        case(current, side, x)
        del x
    assert len(watch.found) == (found is not None)
    assert all(line.startswith(found) for line in watch.found)


def test_only_the_files_asked_for_are_looked_at():
    with watched("gradients/fsdp.py") as watch:
        x = torch.zeros(4)
        freed_while_in_use(torch.cpu.current_stream(), torch.cpu.Stream(), x)
        del x
    assert watch.found == []
