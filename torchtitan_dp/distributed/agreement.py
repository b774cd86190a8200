"""What all ranks must hold alike: the root key of a start, the terms of a run, what is drawn."""

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_dp.privacy.keys import RootKey


def shared_root_key(device: torch.device, debug_seed: int | None) -> RootKey:
    """A fresh root key, rank 0's from its operating system; or that of a debug seed.

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


def of_first_rank(text: str) -> str:
    """What rank 0 has, on all ranks. Collective: a broadcast over the world."""
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
    of_records, agreed = of_first_rank(repr(private)), of_first_rank(repr(terms))
    if (of_records, agreed) == (repr(private), repr(terms)):
        return
    told = f"here {terms}, on rank 0 {agreed}"
    if of_records != repr(private):
        told = "the records differ"
    raise RuntimeError(
        "ranks disagree on the records or the privacy settings: training.dataset_path and "
        f"job.dump_folder must be the same files on every node ({told})"
    )


def know_alike(known: np.ndarray, device: torch.device) -> bool:
    """Whether no two ranks know different values of one thing; the same answer on every rank.

    Collective: an all-reduce over the world of 16 bytes for each value and 16 more, even if there
    are none.

    Args:
        known: int64 of one shape on all ranks; 0 where this rank knows nothing, else 1 to 2^62.
        device: what the default process group's backend sends from.
    """
    assert known.dtype == np.int64
    assert known.min(initial=0) >= 0
    least = np.int64(-(2**62) - 1)  # below minus every value: who knows nothing decides nothing
    highest = np.append(known.ravel(), 1)
    lowest = np.append(np.where(known.ravel() == 0, least, -known.ravel()), -1)
    both = torch.from_numpy(np.stack([highest, lowest])).to(device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    highest, lowest = both.cpu().numpy()
    is_unknown = highest == 0
    return bool(((highest == -lowest) | is_unknown).all())
