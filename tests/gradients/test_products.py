"""Products in fp32 of 16-bit factors: what they are, in whatever memory, and in one operation."""

import pytest
import torch

from torchtitan_dp.gradients.operands import add_product_, write_product_

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def factors(dtype, device, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def tolerance(device, dtype):
    """On CPU a product of 16 bits is rounded to 16 bits; on CUDA it never is."""
    rounded = dtype == torch.bfloat16 and device == "cpu"
    return {"rtol": 1e-2 if rounded else 1e-5, "atol": 0.2 if rounded else 1e-4}


@devices
@dtypes
def test_a_matrix_is_written_and_added_to(device, dtype):
    left, right = factors(dtype, device, (70, 13), (70, 9))
    exact = left.double().T @ right.double()
    out = torch.full((13, 9), torch.nan, device=device)
    write_product_(out, left.T, right)
    torch.testing.assert_close(out.double(), exact, **tolerance(device, dtype))
    add_product_(out, left.T, right)
    torch.testing.assert_close(out.double(), 2 * exact, **tolerance(device, dtype))


@devices
@dtypes
def test_products_of_chunks_of_rows_into_strided_memory(device, dtype):
    """As a reduce-scatter over cp sends them: (cp, B, rows, D), one sample of B at a time."""
    (grad_y_BTP, x_BTD) = factors(dtype, device, (3, 50, 8), (3, 50, 5))
    whole_CBRD = torch.full((4, 3, 2, 5), torch.nan, device=device)
    for sample in range(3):
        left_CRT = grad_y_BTP[sample].T.unflatten(0, (4, 2))
        write_product_(whole_CBRD[:, sample], left_CRT, x_BTD[sample].expand(4, -1, -1))
    exact_BPD = grad_y_BTP.double().mT @ x_BTD.double()
    actual_BPD = whole_CBRD.transpose(0, 1).flatten(1, 2).double()
    torch.testing.assert_close(actual_BPD, exact_BPD, **tolerance(device, dtype))


def test_torch_names_what_accumulates_wide():
    """Used on CUDA where it exists: `products.accumulates_wide` asks for one of the three."""
    for operator in ("mm", "bmm", "addmm"):
        assert hasattr(getattr(torch.ops.aten, operator), "dtype_out"), operator


@pytest.mark.cuda
def test_on_cuda_sums_are_not_rounded_to_16_bits():
    left = torch.ones(4096, 8, device="cuda", dtype=torch.bfloat16)
    out = torch.zeros(8, 8, device="cuda")
    for _ in range(3):
        add_product_(out, left.T, left)
    assert out.unique().tolist() == [3 * 4096.0]
    write_product_(out, left[:4095].T, left[:4095])
    assert out.unique().tolist() == [4095.0]  # bf16 would say 4096
