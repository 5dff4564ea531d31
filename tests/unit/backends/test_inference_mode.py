"""Inference mode inside a compiled function, behind torch's compilers."""

import pytest
import torch
from support import check_same
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import tripwire


class Attention(nn.Module):
    """Keeps keys in a buffer, as models do that decode."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.register_buffer("keys", torch.zeros(2, 9, 4))

    @torch.inference_mode()
    def forward(self, x, start):
        self.keys[: len(x), start : start + x.shape[1]] = self.project(x)
        return x @ self.keys[: len(x), : start + x.shape[1]].mT


@torch.inference_mode()
def in_place(x, y):
    x[:1].copy_(y[:1])
    x[1, 1:].add_(y[1, 1:])
    return x.sum()


def in_the_middle(x, y):
    x = x * 2
    with torch.inference_mode():
        z = y * 2
        y[0] = z[1]
    return x.sum() + y.sum(), torch.is_grad_enabled()


def test_a_cache_that_is_written_in_inference_mode_is_compiled() -> None:
    torch.manual_seed(0)
    plain, mine = Attention(), Attention()
    mine.load_state_dict(plain.state_dict())
    compiled = tripwire.compile(mine, backend="aot_eager")
    x = torch.randn(2, 9, 4)
    for start, end in ((0, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8)):
        check_same(plain(x[:, start:end], start), compiled(x[:, start:end], start))
        torch.testing.assert_close(mine.keys, plain.keys)
    assert compiled.statistics().hits >= 3


@pytest.mark.parametrize("program", [in_place, in_the_middle], ids=lambda one: one.__name__)
def test_what_is_written_in_inference_mode_is_written_by_compiled_code(program) -> None:
    compiled = tripwire.compile(program, backend="aot_eager", fullgraph=True)
    plain, mine = torch.zeros(2, 3), torch.zeros(2, 3)
    for n in range(3):
        given = torch.full((2, 3), float(n))
        weight = torch.ones(2, 3, requires_grad=program is in_the_middle)
        first, second = (weight, plain) if weight.requires_grad else (plain, given)
        expected = program(first, second)
        first, second = (weight, mine) if weight.requires_grad else (mine, given)
        check_same(expected, compiled(first, second))
        torch.testing.assert_close(mine, plain)
    assert compiled.statistics().hits == 2


def test_a_compiler_that_fails_in_inference_mode_leaves_torch_as_it_was() -> None:
    """torch's dispatcher stayed one for Python, and the next call of torch raised."""
    own = aot_autograd(fw_compiler=lambda module, inputs: make_boxed_func(module.forward))
    compiled = tripwire.compile(in_place, backend=own, on_backend_error="eager")
    x = torch.zeros(2, 3)
    for _ in range(2):
        compiled(x, torch.ones(2, 3))
    assert x.tolist() == [[1, 1, 1], [0, 2, 2]]
    assert not torch._C._dispatch_tls_is_dispatch_key_included("PythonDispatcher")
