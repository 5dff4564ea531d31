"""Sizes that torch computes with floats: compiled code may use them as numbers."""

import pytest
import torch
import torch.nn.functional as F
from support import check_compiles


def truncated(x):
    y = F.interpolate(x[None, None], scale_factor=1.3)[0, 0]
    return torch.tensor(y.shape[-1]) * y


def truncated_by_what_varies(x):
    scale = 12 / x.shape[0]
    y = F.interpolate(x[None, None], scale_factor=scale, recompute_scale_factor=True)[0, 0]
    return torch.full((2,), y.shape[-1] * x.shape[0]) * y.sum()


def rounded_up(x):
    y = torch.arange(0.0, x.shape[0], 0.7)
    return torch.tensor(y.shape[0]) * y


PROGRAMS = [truncated, truncated_by_what_varies, rounded_up]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_size_that_torch_scaled_can_be_used_as_a_number(program, backend) -> None:
    calls = [(torch.arange(float(n)),) for n in (10, 12, 14, 17, 21)]
    check_compiles(program, calls, traces=2, backend=backend)
