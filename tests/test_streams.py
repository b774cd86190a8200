"""The recording streams themselves: each fault that they are there for is found."""

import pytest
import torch

from tests.streams import watched


def use(stream, tensor):
    with torch.cpu.stream(stream):
        return tensor + 1


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
        (used_before_it_is_made, "used at once"),
        (freed_while_in_use, "freed while in use"),
        (written_while_it_is_read, "used at once"),
        (an_event_too_early, "freed while in use"),
    ],
)
def test_what_streams_leave_open_is_found(case, found):
    with watched("a test") as watch:
        current, side = torch.cpu.current_stream(), torch.cpu.Stream()
        x = torch.zeros(4)
        case(current, side, x)
        del x
    (line,) = watch.found
    assert line.startswith(found)
