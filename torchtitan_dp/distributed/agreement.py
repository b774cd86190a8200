"""What must be the same on all ranks: the root key of a start, and the terms of a run."""

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.process import Fault


def shared_root_key(device: torch.device, debug_seed: int | None) -> RootKey:
    """Share a fresh root key from rank 0's operating system, or derive one from a debug seed.

    Collective: a broadcast of 32 bytes over the world, from `device`, without a seed.

    Guarantee:
        The key is in the ranks' memory only, and a new one at each call without a seed.
    """
    if debug_seed is not None:
        return RootKey.from_debug_seed(debug_seed)
    secret = bytearray(RootKey.from_os().reveal())
    shared = torch.frombuffer(secret, dtype=torch.uint8).to(device)
    dist.broadcast(shared, src=0)
    return RootKey(shared.cpu().numpy().tobytes())


def broadcast_from_rank0(text: str) -> str:
    """Return rank 0's text on all ranks. Collective: a broadcast over the world."""
    shared: list[str] = [text]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def require_agreement(terms: Mapping[str, object]) -> None:
    """Refuse to train if ranks see other records or terms: one record could count twice.

    Collective: an all-gather over the world of 32 bytes for each term.

    Args:
        terms: by their names in the error. They are compared by their `repr`.

    Raises:
        Fault: the same on all ranks if any two differ, with the names of the terms that differ.

    Guarantee:
        No term's content leaves its rank: only SHA-256 digests are sent, only names printed.
    """
    own = [hashlib.sha256(repr(term).encode()).digest() for term in terms.values()]
    gathered: list[list[bytes]] = [own] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    others = [rank for rank, digests in enumerate(gathered) if digests != gathered[0]]
    if not others:
        return
    by_term = zip(*gathered, strict=True)
    differing = [name for name, digests in zip(terms, by_term, strict=True) if len({*digests}) > 1]
    raise Fault(
        f"ranks disagree on {' and '.join(differing)} (rank {others[0]} is the first to differ "
        "from rank 0): training.dataset_path and job.dump_folder must be the same files on every "
        "node, and the configuration, the installed packages and the kind of device must be the "
        "same"
    )
