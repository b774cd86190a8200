"""Loading a checkpoint runs no code from it, and tells damaged bytes, however small."""

import io
import json
import os
import pickle
import struct
import tracemalloc
import warnings
import zipfile
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.filesystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from torchtitan_dp.checkpoint.folder import (
    SETTINGS,
    damage,
    damaged_entry,
    refuse_another_model,
    refuse_other_settings,
)
from torchtitan_dp.checkpoint.safe_load import entries, load, read_metadata


class Malicious:
    """Makes a folder when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def content():
    return {
        "weight": torch.arange(6.0).reshape(2, 3),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "state": {"step": 3, "betas": (0.9, 0.95), "rates": [1e-3], "ledger": '{"steps": 3}'},
        "flag": True,
    }


def blank():
    return {
        "weight": torch.zeros(2, 3),
        "half": torch.zeros(5, dtype=torch.bfloat16),
        "state": {"step": 0, "betas": None, "rates": None, "ledger": ""},
        "flag": False,
    }


def save(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return str(folder)


def edit_metadata(folder, edit):
    """Write the checkpoint's metadata again as `edit` leaves it."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    edit(metadata)
    with open(os.path.join(folder, ".metadata"), "wb") as file:
        pickle.dump(metadata, file)


@pytest.fixture
def saved(tmp_path):
    return save(content(), tmp_path / "step-1")


def test_what_was_saved_is_loaded(saved):
    state = blank()
    load(state, saved, no_dist=True)
    expected = content()
    assert torch.equal(state.pop("weight"), expected.pop("weight"))
    assert torch.equal(state.pop("half"), expected.pop("half"))
    assert state == expected
    assert damage(saved) == damaged_entry(saved, 0, 1) == ""


def test_metadata_is_that_of_pytorchs_reader(saved):
    """Also tells when PyTorch adds to its records: a new one would be refused here."""
    theirs, ours = dcp.FileSystemReader(saved).read_metadata(), read_metadata(saved)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data


def test_pytorchs_own_unpickling_is_never_reached(saved, monkeypatch):
    """Tells when PyTorch reads metadata, or values, in a place that is not ours."""

    def refuse(*args, **kwargs):
        raise AssertionError("the full pickle was used")

    original, unsafe = torch.load, []

    def watched(file, *args, weights_only=None, **kwargs):
        if weights_only is not True:
            unsafe.append(file)
        return original(file, *args, weights_only=weights_only, **kwargs)

    monkeypatch.setattr(torch.distributed.checkpoint.filesystem.pickle, "load", refuse)
    monkeypatch.setattr(torch, "load", watched)
    load(blank(), saved, no_dist=True)
    # PyTorch's planner unpickles the plain values that we have pickled again.
    assert len(unsafe) == len([e for e in entries(read_metadata(saved)) if not e.is_tensor])


def test_malicious_metadata_is_refused(saved, tmp_path):
    made = tmp_path / "made"
    edit_metadata(saved, lambda metadata: setattr(metadata, "planner_data", Malicious(made)))
    words = r"it asks for posix\.mkdir"
    if torch.__version__ < "2.13":
        words += "|metadata is None"  # torch 2.11 does not pass the reason on
    with pytest.raises(dcp.api.CheckpointException, match=words):
        load(blank(), saved, no_dist=True)
    assert "posix.mkdir" in damage(saved)
    assert not made.exists()
    dcp.FileSystemReader(saved).read_metadata()  # the attack works where nothing guards
    assert made.exists()


def test_a_malicious_value_is_refused(tmp_path):
    made = tmp_path / "made"
    folder = save({**content(), "flag": Malicious(made)}, tmp_path / "step-1")
    assert damage(folder) == ""  # the metadata knows nothing of it
    assert "flag in __0_0.distcp" in damaged_entry(folder, 0, 1)
    with pytest.raises(dcp.api.CheckpointException, match="mkdir"):
        load(blank(), folder, no_dist=True)
    assert not made.exists()
    dcp.load(blank(), checkpoint_id=folder, no_dist=True)
    assert made.exists()


def outside(metadata):
    next(iter(metadata.storage_data.values())).relative_path = "../other"


def moved(metadata):
    metadata.state_dict_metadata["weight"].chunks[0].offsets = torch.Size((1, 0))


def shorter(metadata):
    metadata.state_dict_metadata["weight"].chunks[0].sizes = torch.Size((1, 3))


def stored_nowhere(metadata):
    (index,) = (index for index in metadata.storage_data if index.fqn == "weight")
    metadata.storage_data[MetadataIndex("weight", (1, 0))] = metadata.storage_data.pop(index)


def in_the_same_bytes(metadata):
    first, second, *_ = sorted(metadata.storage_data.values(), key=lambda place: place.offset)
    second.offset = first.offset


@pytest.mark.parametrize(
    "edit, told",
    [
        (outside, "outside"),
        *((edit, "the chunks of weight") for edit in (moved, shorter, stored_nowhere)),
        (in_the_same_bytes, "lies where another entry does"),
    ],
)
def test_metadata_that_cannot_be_right_is_told(saved, edit, told):
    edit_metadata(saved, edit)
    assert told in damage(saved)


@pytest.mark.parametrize("start, fault", [(2, True), (3, False)])
def test_chunks_that_overlap_are_told(saved, start, fault):
    """They hold as many numbers as the tensor does, and leave one of it out."""

    def in_two(metadata):
        second = ChunkStorageMetadata(torch.Size((start,)), torch.Size((2,)))
        first = ChunkStorageMetadata(torch.Size((0,)), torch.Size((3,)))
        metadata.state_dict_metadata["half"].chunks = [second, first]
        (place,) = (at for index, at in metadata.storage_data.items() if index.fqn == "half")
        index = MetadataIndex("half", second.offsets)
        metadata.storage_data[index] = replace(place, relative_path="__1_0.distcp")

    edit_metadata(saved, in_two)
    assert ("the chunks of half" in damage(saved)) == fault


@pytest.mark.parametrize(
    "damaged",
    [
        b"N" + pickle.LONG_BINPUT + struct.pack("<I", 2**24),  # C's memo would have 2**25 places
        pickle.BYTEARRAY8 + struct.pack("<Q", 2**28),
        pickle.BINBYTES8 + struct.pack("<Q", 2**28),
    ],
)
def test_damaged_bytes_ask_for_no_memory(saved, damaged):
    with open(os.path.join(saved, ".metadata"), "wb") as file:
        file.write(pickle.PROTO + b"\x05" + damaged + pickle.STOP)
    tracemalloc.start()
    try:
        assert ".metadata" in damage(saved)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


# What each adds to `p`, in the pickle language: "h\\0" and the like name what was made before.
_SIZE = b"(" + b"K\1" * 2000 + b"t"
BOMBS = {
    "a path of paths": (b"cpathlib\nPosixPath\n", b"\x8c\x02aa\x85R", b"h\0h\1h\1\x86R"),
    "one text as paths": (
        b"cpathlib\nPosixPath\n",
        b"X\xa0\x0f\0\0" + b"a/" * 2000,
        b"h\0h\1\x85R",
    ),
    "one size again": (b"ctorch\nSize\n", _SIZE, b"h\0h\1\x85R"),
    "one size by its type": (b"ctorch\nSize\n", _SIZE, b"h\0h\1\x85\x81"),
    "one size in indices": (
        b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n",
        _SIZE,
        b"h\0K\0h\1\x86R",
    ),
    "one state for all": (
        b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n",
        b"}(" + b"".join(b"\x8c\4%04dN" % i for i in range(1500)) + b"u",
        b"h\0)\x81h\1b",
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_metadata_takes_memory_in_proportion_to_its_size(bomb, tmp_path):
    made, first, again = BOMBS[bomb]
    times = 21 if bomb == "a path of paths" else 2000
    grows = b"q\1" if bomb == "a path of paths" else b""
    content = b"\x80\4(" + made + b"q\0" + first + b"q\1" + (again + grows) * times + b"t."
    (tmp_path / ".metadata").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"its \.metadata cannot be read: it "):
        read_metadata(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20 + 200 * len(content)


def test_metadata_changes_no_class(saved):
    """`BUILD` could set attributes of the records' classes, for the rest of the process."""
    name = pickle.GLOBAL + f"{Metadata.__module__}\nMetadata\n".encode()
    state = pickle.dumps((None, {"planted": 1}), 2)[2:-1]
    with open(os.path.join(saved, ".metadata"), "wb") as file:
        file.write(name + state + pickle.BUILD + pickle.STOP)
    try:
        assert "it changes" in damage(saved)
        assert not hasattr(Metadata, "planted")
    finally:
        if hasattr(Metadata, "planted"):
            del Metadata.planted


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_truncated_or_missing_file_is_told(saved, name):
    path = os.path.join(saved, name)
    os.truncate(path, os.path.getsize(path) - 1)
    assert name in damage(saved)
    assert name in damaged_entry(saved, 0, 1)
    os.unlink(path)
    assert name in damage(saved)


def flip(folder, name):
    """Flip one bit of a tensor's data, or of a pickled value, which no size tells."""
    (entry,) = (e for e in entries(read_metadata(str(folder))) if e.name == name)
    with open(os.path.join(folder, entry.file), "rb+") as file:
        file.seek(entry.offset)
        archive = io.BytesIO(file.read(entry.length))
        with zipfile.ZipFile(archive) as stored:
            part = max(stored.infolist(), key=lambda i: i.filename.endswith("/data/0"))
            last = stored.read(part)[-8:]
        file.seek(entry.offset + archive.getvalue().index(last))
        file.write(bytes([last[0] ^ 1]))


@pytest.mark.parametrize("name", ["weight", "half", "flag", "state.ledger"])
def test_one_flipped_bit_is_told(saved, name):
    """By one of the ranks that share the reading."""
    flip(saved, name)
    assert damage(saved) == ""
    told = [damaged_entry(saved, rank, 3) for rank in range(3)]
    assert len([problem for problem in told if problem.startswith(f"{name} in ")]) == 1


def test_another_model_is_refused(saved):
    meta = {"weight": torch.empty(2, 3, device="meta"), "half": torch.empty(5, device="meta")}
    refuse_another_model(saved, meta, "model.flavor = 'debug'")
    meta["weight"] = torch.empty(2, 4, device="meta")
    with pytest.raises(ValueError, match=r"^model\.flavor = 'debug': its weight is \[2, 4\], .*"):
        refuse_another_model(saved, meta, "model.flavor = 'debug'")


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"eps": 1e-6}, "its eps is 1e-06, that of the checkpoint .* is 1e-05; set it back"),
        ({"rope": {"theta": 2.0, "factors": [1, 2]}}, r"its rope\.theta is 2\.0, .* is 1\.0; set"),
        ({"rope": {"theta": 1.0, "factors": [1, 3]}}, r"its rope\.factors\.1 is 3, .* is 2; set"),
        ({"window": 8}, "its window is 8, that of the checkpoint .* is null; set it back"),
    ],
)
def test_other_settings_of_the_model_are_refused(tmp_path, changed, said):
    """Not what is unset, nor a checkpoint from before; a damaged one is left to the load."""
    given = {"eps": 1e-5, "rope": {"theta": 1.0, "factors": (1, 2)}}
    step = save({SETTINGS: json.dumps(given)}, tmp_path / "step-1")
    same = {"eps": 1e-5, "rope": {"theta": 1, "factors": [1, 2]}, "window": None}
    refuse_other_settings(step, same, "config.json")
    with pytest.raises(ValueError, match=rf"^config\.json: {said}.*job\.dump_folder$"):
        refuse_other_settings(step, given | changed, "config.json")
    refuse_other_settings(save({}, tmp_path / "older"), given | changed, "config.json")
    broken = save({SETTINGS: "{"}, tmp_path / "broken")
    refuse_other_settings(broken, given | changed, "config.json")
