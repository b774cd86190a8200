"""One step of plain TorchTitan on one rank, on fake tensors: what the plan and the counts hold
private steps against.

It is what `BaselineTrainer` does: the model and the loss of a private run, gradients that FSDP2
reduces and adds up in every microbatch, TorchTitan's clipping of the whole batch's gradient, AdamW.
"""

import copy
from typing import Any

import torch

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.context_parallel import prepare_context_parallel_input

from torchtitan_dp.config import JobConfig
from torchtitan_dp.models.causal_lm.model import CausalLM
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.parallelize import parallelize
from torchtitan_dp.plan.fake_step import MemoryTracker, end_stretches_at_blocks, parallel_dims


class PlainStep:
    """Lays a model over the mesh of a default process group and takes TorchTitan's step."""

    def __init__(self, config: JobConfig, args: ModelArgs, tracker: MemoryTracker) -> None:
        """
        Args:
            config: checked, without privacy, for the process group's world size.
            tracker: entered already, if memory is of interest.
        """
        self.config, self.tracker = config, tracker
        with unset_fake_temporarily():
            dims, _ = parallel_dims(config)
            with torch.device("meta"):
                args = copy.deepcopy(args)
                args.max_seq_len = config.training.seq_len
                self.model = CausalLM(args)
            parallelize(self.model, dims, config)
        with tracker.labelled("parameters"):
            self.model.to_empty(device="cpu")
            self.parameters = list(self.model.parameters())
            for parameter in self.parameters:
                torch.nn.init.zeros_(parameter.to_local())
        with tracker.labelled("accumulator"):  # no microbatch is the first of a step
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        # One parameter at a time: temporaries as small as those of the fused kernel.
        self.optimizer = torch.optim.AdamW(self.parameters, foreach=False, fused=False)
        self.model.output.register_forward_pre_hook(self._enter_loss_head)
        end_stretches_at_blocks(self.model, tracker)
        self._cp_mesh = dims.get_optional_mesh("cp")

    def microbatch(self, seq_len: int) -> None:
        """Run forward and backward, and add to the gradients."""
        self.model.model_args.max_seq_len = seq_len
        with torch.no_grad(), torch.device("cpu"), self.tracker.labelled("activations"):
            self.model.compute_buffers()
        shape = self.config.training.local_batch_size, seq_len
        tokens_BT = torch.zeros(shape, dtype=torch.int64)
        labels_BT, more = torch.zeros_like(tokens_BT), {}
        valid_tokens = torch.tensor(float(tokens_BT.numel()))
        if self._cp_mesh is not None:
            tokens_BT, labels_BT, more = prepare_context_parallel_input(
                tokens_BT,
                labels_BT,
                {},
                self._cp_mesh,
                torch.device("cpu"),
                self.config.parallelism.context_parallel_load_balancer,
            )
        one = torch.ones((), dtype=torch.int64)
        loss = self.model(tokens_BT, labels=labels_BT, targets=one, **more) / valid_tokens
        loss.sum().backward()
        self.tracker.base = "activations"
        self.tracker.end_stretch("end")

    def update(self) -> None:
        """Measure the gradients' norm, and step AdamW; the gradients stay."""
        dist_utils.clip_grad_norm_(self.parameters, float("inf"), foreach=True)
        with self.tracker.labelled("optimizer"):
            self.optimizer.step()

    def _enter_loss_head(self, _: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self.tracker.base = "loss_head"
        inputs[0].register_hook(lambda _: setattr(self.tracker, "base", "activations"))
