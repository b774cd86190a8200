"""Loading of DCP checkpoints without running code from them.

PyTorch unpickles a checkpoint's `.metadata` and all values but tensors with the full `pickle`,
which runs any code in a file. Here `.metadata` may name DCP's own records only, and values are
plain (`torch.load(weights_only=True)`). All loading goes through `load`.
"""

import io
import itertools
import math
import os
import pathlib
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Sized
from typing import IO, Any, ClassVar, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from torchtitan_dp.torch_private import checkpoint_records

METADATA_FILE = ".metadata"
_RECORDS = (
    records.Metadata,
    records.TensorStorageMetadata,
    records.BytesStorageMetadata,
    records.ChunkStorageMetadata,
    records.TensorProperties,
    records.MetadataIndex,
    records.StorageMeta,
    *checkpoint_records(),
)


def _path(*parts: str) -> pathlib.PurePosixPath:
    """Build the path where a checkpoint was saved, which is never opened, from strings alone."""
    if not all(isinstance(part, str) for part in parts):  # of paths: each doubles the one before
        raise pickle.UnpicklingError("it makes a path of what is no text")
    return pathlib.PurePosixPath(*parts)


_ALLOWED: dict[tuple[str, str], Any] = {
    **{(record.__module__, record.__name__): record for record in _RECORDS},
    **{("torch", n): value for n, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,  # Python 3.13
}


class Entry(NamedTuple):
    """The `torch.save` archive of a chunk or a value: its place in a file."""

    file: str
    offset: int
    length: int
    is_tensor: bool
    name: str


class _MetadataUnpickler(pickle._Unpickler):
    """An unpickler of the records in `_ALLOWED` alone, in memory in proportion to the file's size.

    In Python: the implementation in C reserves the size that a damaged byte names (24 GiB). A
    pickle can refer in two bytes to an object that it has made, so the items and characters that
    calls and records copy are counted: no more than the file has bytes.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._left = len(content)

    def _count(self, given: Any) -> None:
        parts = given if isinstance(given, tuple) else ()
        self._left -= len(given) + sum(len(one) for one in parts if isinstance(one, Sized))
        if self._left < 0:
            raise pickle.UnpicklingError("it copies more than it has")

    def _reduce(self: Any) -> None:
        self._count(self.stack[-1])
        pickle._Unpickler.dispatch[pickle.REDUCE[0]](self)

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None

    def _build(self: Any) -> None:
        """Set attributes of a record that was just made, never of a class or a function."""
        if callable(self.stack[-2]):
            raise pickle.UnpicklingError(f"it changes {self.stack[-2]}")
        self._count(self.stack[-1])
        pickle._Unpickler.dispatch[pickle.BUILD[0]](self)

    def _new(self: Any) -> None:
        if self.stack[-1]:
            raise pickle.UnpicklingError(f"it makes {self.stack[-2]} of arguments")
        pickle._Unpickler.dispatch[pickle.NEWOBJ[0]](self)

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("it reserves memory, or calls in a way that nothing needs")

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: _build,
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _new,
        pickle.BYTEARRAY8[0]: _refuse,
        pickle.INST[0]: _refuse,
        pickle.OBJ[0]: _refuse,
        pickle.NEWOBJ_EX[0]: _refuse,
    }


def read_metadata(folder: str | os.PathLike[str]) -> Metadata:
    """Read a checkpoint's `.metadata`, and run no code from it.

    Raises:
        ValueError: it is missing or damaged, or names what no checkpoint needs.
    """
    try:
        content = pathlib.Path(folder, METADATA_FILE).read_bytes()
        metadata = _MetadataUnpickler(content).load()
        _check_entries(metadata)
        for name, kind in metadata.state_dict_metadata.items():
            if isinstance(kind, records.TensorStorageMetadata):
                _check_chunks(metadata, name, kind)
    except Exception as error:  # pickle raises a dozen kinds for damaged bytes
        reason = str(error) or type(error).__name__
        raise ValueError(f"its {METADATA_FILE} cannot be read: {reason}") from error
    return metadata


def _check_entries(metadata: Metadata) -> None:
    """Raise ValueError unless entries lie within the folder, and no two in the same bytes."""
    end = 0
    last_file = ""
    for entry in sorted(entries(metadata)):
        if os.path.basename(entry.file) != entry.file or min(entry.offset, entry.length) < 0:
            raise ValueError(f"{entry.name} lies outside of it")
        if entry.file == last_file and entry.offset < end:
            raise ValueError(f"{entry.name} lies where another entry does")
        last_file, end = entry.file, entry.offset + entry.length


def _check_chunks(metadata: Metadata, name: str, tensor: records.TensorStorageMetadata) -> None:
    """Raise ValueError unless a tensor's chunks are all there and make it up, without overlap.

    Overlaps are looked for where chunks are blocks of rows, as FSDP2's shards are.
    """
    held = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    inside = all(
        0 <= offset <= offset + size <= whole
        for chunk in tensor.chunks
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
    )
    stored = all(
        records.MetadataIndex(name, chunk.offsets) in metadata.storage_data
        for chunk in tensor.chunks
    )
    whole = held == math.prod(tensor.size) and inside and stored
    if not whole or _rows_overlap(tensor):
        raise ValueError(f"the chunks of {name} do not make it up")


def _rows_overlap(tensor: records.TensorStorageMetadata) -> bool:
    if any(chunk.sizes[1:] != tensor.size[1:] for chunk in tensor.chunks):
        return False  # not blocks of rows
    rows = sorted((*chunk.offsets[:1], *chunk.sizes[:1]) for chunk in tensor.chunks)
    return any(sum(before) > after[0] for before, after in itertools.pairwise(rows))


def entries(metadata: Metadata) -> Iterator[Entry]:
    """Yield all entries of a checkpoint's files."""
    for index, place in metadata.storage_data.items():
        kind = metadata.state_dict_metadata[index.fqn]
        is_tensor = isinstance(kind, records.TensorStorageMetadata)
        yield Entry(place.relative_path, place.offset, place.length, is_tensor, index.fqn)


def has_state(folder: str | os.PathLike[str], state: str) -> bool:
    """Return whether a checkpoint has any entry of a state; raise ValueError if it is damaged."""
    names = read_metadata(folder).state_dict_metadata
    return any(name.startswith(f"{state}.") for name in names)


def shapes(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of each tensor, by name."""
    return {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, records.TensorStorageMetadata)
    }


def check_entry(file: IO[bytes], entry: Entry) -> None:
    """Raise ValueError unless an entry has the CRC-32 that `torch.save` wrote.

    Reads it into memory. No protection against forgery: a forger can write the sums, too.
    """
    file.seek(entry.offset)
    content = io.BytesIO(file.read(entry.length))
    try:
        with zipfile.ZipFile(content) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise ValueError(f"{broken} has another CRC-32")
        if not entry.is_tensor:
            content.seek(0)
            _load_value(content)
    except Exception as error:  # zipfile, zlib and struct each have their own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{entry.name} in {entry.file} is damaged: {reason}") from error


class SafeReader(dcp.FileSystemReader):
    """PyTorch's reader of files, with the restricted unpickler for `.metadata`."""

    # Without its `kwargs` DCP does not look for metadata of single ranks, which we never save.
    def read_metadata(self) -> Metadata:
        metadata = read_metadata(self.path)
        metadata.storage_meta = metadata.storage_meta or records.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """PyTorch's planner, but for plain values only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(_load_value(value), plain)  # what the planner unpickles is ours
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load(state_dict: dict[str, Any], folder: str, *, no_dist: bool = False) -> None:
    """Load in place as `dcp.load` does, without running code from the checkpoint.

    Collective over the world.

    Raises:
        CheckpointException: PyTorch's, if a rank could not read it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as `no_dist` asks
        dcp.load(
            state_dict, storage_reader=SafeReader(folder), planner=SafePlanner(), no_dist=no_dist
        )


def _load_value(file: io.BytesIO) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)
