"""What all ranks must hold alike: the root key of a start, the terms of a run, what is drawn."""

import torch
import torch.distributed as dist

from torchtitan_dp.privacy.keys import RootKey


def shared_root_key(device: torch.device, debug_seed: int | None) -> RootKey:
    """Share a fresh root key, from rank 0's operating system, or that of a debug seed.

    Collective: a broadcast of 32 bytes over the world.

    Args:
        device: what the default process group's backend sends from.
        debug_seed: `privacy.debug_seed`; the run is then not private.

    Guarantee:
        The key is in the ranks' memory only, and another at each call unless a seed is given.
    """
    if debug_seed is not None:
        return RootKey.from_debug_seed(debug_seed)
    secret = bytearray(RootKey.from_os().reveal())
    shared = torch.frombuffer(secret, dtype=torch.uint8).to(device)
    dist.broadcast(shared, src=0)
    return RootKey(shared.cpu().numpy().tobytes())


def broadcast_from_rank0(text: str) -> str:
    """Return what rank 0 has, on all ranks. Collective: a broadcast over the world."""
    shared: list[str] = [text]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def require_agreement(terms: tuple[object, ...], private: tuple[object, ...] = ()) -> None:
    """Refuse to train if ranks see other records or terms: one record could count twice.

    Collective: rank 0's are broadcast over the world.

    Args:
        private: terms as well, which the message leaves out.

    Raises:
        RuntimeError: on each rank whose terms read otherwise than rank 0's.
    """
    of_records, agreed = broadcast_from_rank0(repr(private)), broadcast_from_rank0(repr(terms))
    if (of_records, agreed) == (repr(private), repr(terms)):
        return
    told = f"here {terms}, on rank 0 {agreed}"
    if of_records != repr(private):
        told = "the records differ"
    raise RuntimeError(
        "ranks disagree on the records or the privacy settings: training.dataset_path and "
        f"job.dump_folder must be the same files on every node ({told})"
    )
