"""The selfcheck, for ranks that share one CUDA device on gloo, which NCCL refuses.

    torchrun --nproc_per_node 2 -m tests.selfcheck.shared_device --backend cpu:gloo,cuda:gloo …

Functional collectives go by gloo's coalesced all-gather, which reads a device's memory as the
host's and dies (pytorch/pytorch#152645); its plain one copies.
"""

import sys

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from torchtitan_dp.base.collectives import all_gather
from torchtitan_dp.selfcheck.__main__ import main


def plain_all_gather(input: Tensor, group_size: int, group_name: str) -> Tensor:
    return all_gather(input, _resolve_process_group(group_name)).flatten(0, 1)


if __name__ == "__main__":
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", plain_all_gather, "CUDA")
    main(sys.argv[1:])
