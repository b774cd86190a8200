"""The seams to other libraries: private names are behind doors, and TorchTitan's are listed. A
release that moves one fails here, by that name."""

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from functools import reduce
from types import ModuleType
from typing import Any

import pytest

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU
from tests.test_imports import modules
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.checks import keys
from torchtitan_dp.config.load import load_config

DOORS = {
    "base.torch_private": """
        torch._utils._get_available_device_type
        torch.distributed.ProcessGroupGloo._Options._devices
        torch.distributed.ProcessGroupGloo._Options._threads
        torch.distributed.ProcessGroupGloo._Options._timeout
        torch.distributed.distributed_c10d._set_pg_timeout
        torch.distributed._functional_collectives.AsyncCollectiveTensor
        torch.distributed._functional_collectives.all_gather_tensor
        torch.distributed._functional_collectives.all_to_all_single
        torch.distributed._functional_collectives.permute_tensor
        torch.distributed._functional_collectives.wait_tensor
        torch.ops.aten._scaled_dot_product_flash_attention.default
        torch.ops.aten._scaled_dot_product_flash_attention_backward.default
        torch.ops.aten._scaled_dot_product_cudnn_attention.default
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
        torch.ops.aten._scaled_dot_product_efficient_attention.default
        torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        torch.ops.aten.mm.default._schema.arguments
        torch.distributed.distributed_c10d._resolve_process_group
        torch.distributed.tensor.experimental._context_parallel._attention.custom_ops
        torch.distributed.tensor._utils.compute_local_shape_and_global_offset
        torch.nn.modules.batchnorm._NormBase
        torch.nn.Module._parameters
        torch.Tensor._indices
        torch.Tensor._values
        torch.utils._python_dispatch.TorchDispatchMode
        torch.utils._pytree.tree_iter
        torch._subclasses.fake_tensor.FakeTensorMode
        torch._subclasses.fake_tensor.unset_fake_temporarily
        torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.unshard
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.wait_for_unshard
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.fsdp_params
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParam._unsharded_param
        torchtitan.components.checkpoint.CheckpointManager._should_save
        torchtitan.models.llama3.infra.parallelize._op_sac_save_list
    """,
    "models.causal_lm.attention": """
        transformers.PreTrainedModel._init_weights
        transformers.PreTrainedModel._tied_weights_keys
        transformers.PreTrainedModel._get_dtype_plan
        transformers.PreTrainedModel._supports_attention_backend
        transformers.masking_utils.find_packed_sequence_indices
    """,
}
"""Private names, by the one module that may use them."""

IN_OTHER_TESTS = {"_C", "_cudnn"}  # of the CUDA build: tests/distributed/test_attention.py
PYTHONS = {"_asdict", "_exit", "_fields", "_make", "_replace", "_Unpickler"}
NAMING = {"delattr", "getattr", "hasattr", "object", "setattr", "wrapped"}  # `mock.patch.object`


def is_private(name: object) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", str(name)) is not None


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield names that a module defines, members among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            text = ast.unparse(node)
            if "." not in text or text.startswith("self."):
                yield text.removeprefix("self.")


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (name in the module, dotted name) of what is imported from outside the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            if not source.startswith("torchtitan_dp."):
                yield from ((one.asname or one.name, source + one.name) for one in node.names)


def private_names(tree: ast.AST, own: set[str], of_package: set[str]) -> Iterator[str]:
    """Yield the private names of others that a module imports, reads or names in strings."""
    imported = dict(imports(tree))
    for dotted in imported.values():
        yield from filter(is_private, dotted.split("."))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            known = of_package if owner in ("self", "super()") else own
            if owner.split(".")[0] in imported or node.attr not in known:
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in NAMING:
            named = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            yield from (str(name) for name in named if is_private(name) and name not in of_package)


def foreign() -> dict[str, set[str]]:
    """Return the private names of other libraries that each module uses."""
    trees = {name: ast.parse(path.read_text()) for name, path in modules().items()}
    own = {name: {*defined(tree)} for name, tree in trees.items()}
    of_package = set[str]().union(*own.values())
    found = {
        name: {*private_names(tree, own[name], of_package)} - PYTHONS
        for name, tree in trees.items()
    }
    return {name: names for name, names in found.items() if names}


def test_private_names_are_behind_doors() -> None:
    found = foreign()
    assert {name: found[name] for name in found.keys() - DOORS.keys()} == {}
    for door, dotted in DOORS.items():
        listed = {part for name in dotted.split() for part in name.split(".") if is_private(part)}
        of_forward = {name.removesuffix("_backward") for name in listed}
        assert found[door] - IN_OTHER_TESTS <= of_forward
        source = modules()[door].read_text()
        assert [name for name in of_forward if name not in source] == []


def named(dotted: str) -> Any:
    """Return what a dotted name is of; None for an attribute that instances get."""
    library, *parts = dotted.split(".")
    return reduce(_member, parts, pytest.importorskip(library))


def _member(owner: Any, name: str) -> Any:
    if hasattr(owner, name):
        return getattr(owner, name)
    if isinstance(owner, ModuleType):
        return importlib.import_module(f"{owner.__name__}.{name}")
    assert re.search(rf"\b{name}\b *[:=]", inspect.getsource(owner)), f"{owner} has no {name}"
    return None


@pytest.mark.parametrize("dotted", " ".join(DOORS.values()).split())
def test_a_private_name_is_there(dotted: str) -> None:
    named(dotted)


TORCHTITAN = {
    "components.checkpoint": "AsyncMode CheckpointManager LR_SCHEDULER MODEL OPTIMIZER",
    "components.loss": "IGNORE_INDEX build_cross_entropy_loss",
    "components.lr_scheduler": "build_lr_schedulers",
    "components.metrics": "BaseLogger DeviceMemStats MetricsProcessor build_device_memory_monitor",
    "components.optimizer": "OptimizersContainer build_optimizers",
    "config": "JobConfig TORCH_DTYPE_MAP",
    "config.job_config": "ActivationCheckpoint Checkpoint JobConfig Model Optimizer "
    "Parallelism Training Validation",
    "distributed": "ParallelDims",
    "distributed.activation_checkpoint": "apply_ac",
    "distributed.context_parallel": "apply_cp_to_attention_module",
    "distributed.utils": "set_pg_timeouts",
    "models.attention": "ScaledDotProductAttentionWrapper",
    "models.llama3.infra.parallelize": "_op_sac_save_list",
    "protocols.model": "BaseModelArgs ModelProtocol",
    "protocols.state_dict_adapter": "StateDictAdapter",
    "protocols.train_spec": "TrainSpec register_train_spec",
    "tools.logging": "init_logger logger",
    "tools.utils": "NoColor device_type get_peak_flops",
    "train": "Trainer",
}
"""All that the package uses of TorchTitan, beside members of these classes: what a fork would have
to keep (docs/architecture.md)."""


def test_these_names_of_torchtitan_are_used_and_no_others() -> None:
    used = set()
    for path in modules().values():
        tree = ast.parse(path.read_text())
        imported = {n: dotted for n, dotted in imports(tree) if dotted.startswith("torchtitan.")}
        used |= {name for name in imported.values() if not isinstance(named(name), ModuleType)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                module = imported.get(ast.unparse(node.value), "")
                if module and isinstance(named(module), ModuleType):
                    used.add(f"{module}.{node.attr}")
    listed = {f"torchtitan.{part}.{n}" for part, names in TORCHTITAN.items() for n in names.split()}
    assert used == listed


@pytest.mark.parametrize("part", TORCHTITAN)
def test_torchtitan_has_them(part: str) -> None:
    for name in TORCHTITAN[part].split():
        named(f"torchtitan.{part}.{name}")


def test_the_schema_that_is_read_alone_is_torchtitans() -> None:
    """`config.load` reads one file of TorchTitan's, without what that imports: keys, types and
    defaults are those of the package, and ours are merged as `ConfigManager` does."""
    from torchtitan.config import ConfigManager

    from torchtitan_dp.config.load import schema

    theirs = ConfigManager()._merge_configs(
        importlib.import_module("torchtitan.config").JobConfig, JobConfig
    )
    assert list(keys(schema())) == list(keys(theirs))
    assert dataclasses.asdict(schema()()) == dataclasses.asdict(theirs())
    assert sys.modules["torch"].__file__ is not None  # its stand-in is gone


def test_what_torchtitans_sections_assert_is_refused_by_key() -> None:
    """These would be tracebacks; a new one is listed here, and in `config.checks`."""
    source = inspect.getsource(importlib.import_module("torchtitan.config.job_config"))
    assert source.count("__post_init__") == source.count("assert (") + 1 == 2
    for given in ("--validation.steps=0", "--parallelism.context_parallel_load_balancer="):
        with pytest.raises(ValueError, match=given.strip("-=0")):
            load_config([given], 1)
