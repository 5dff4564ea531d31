"""Functions of the user's in the places of torch's, which call what was there before."""

import subprocess
import sys

import pytest

# torch tells a mode which function was called by looking up its name, and finds the new one.
_REPLACED = {
    "method": ("torch.Tensor", "relu", "x.relu()"),
    "method in place": ("torch.Tensor", "add_", "x.clone().add_(1)"),
    "method in Python": ("torch.Tensor", "norm", "x.norm()"),
    "operator": ("torch.Tensor", "__rsub__", "1 - x"),
    "index": ("torch.Tensor", "__getitem__", "x[1:]"),
    "property": ("torch.Tensor", "mT", "x.view(2, 2).mT"),
    "function": ("torch", "relu", "torch.relu(x)"),
    "function in Python": ("torch", "einsum", "torch.einsum('i,i->i', x, x)"),
    "functional": ("nn.functional", "relu", "nn.functional.relu(x)"),
    "functional behind a module": ("nn.functional", "silu", "nn.SiLU()(x)"),
    "functional with options": ("nn.functional", "softmax", "nn.functional.softmax(x, dim=0)"),
    "functional in C": ("nn.functional", "gelu", "nn.functional.gelu(x)"),
}
_PROGRAM = """
import torch
from torch import nn

def doubled(old):
    if hasattr(old, "__get__") and not callable(old):
        return property(lambda x: old.__get__(x) * 2)
    return lambda *args, **kwargs: old(*args, **kwargs) * 2

def replace():
    for owner, name in {names}:
        setattr(owner, name, doubled(getattr(owner, name)))

{moment}
x = torch.tensor([3.0, -1.0, 2.0, 0.5])
for name, call in {calls}.items():
    wanted = call(x).tolist()
    for backend in ("eager", "aot_eager"):
        compiled = tripwire.compile(call, backend=backend)
        got = [compiled(x).tolist() for _ in range(3)]
        assert got == [wanted] * 3, (name, backend, got, wanted)
        assert compiled.statistics().hits == 2, (name, backend)
"""
_MOMENTS = {
    "before tripwire is imported": "replace()\nimport tripwire",
    "after it is imported": "import tripwire\nreplace()",
    "after a call": "import tripwire\ntripwire.compile(torch.relu)(torch.ones(1))\nreplace()",
}


@pytest.mark.parametrize("moment", _MOMENTS)
def test_a_function_that_stands_in_for_torchs_runs_once(moment, tmp_path) -> None:
    names = ", ".join(f"({owner}, {name!r})" for owner, name, _ in _REPLACED.values())
    calls = ", ".join(f"{name!r}: lambda x: {body}" for name, (*_, body) in _REPLACED.items())
    program = tmp_path / "program.py"
    text = _PROGRAM.format(names=f"[{names}]", calls=f"{{{calls}}}", moment=_MOMENTS[moment])
    program.write_text(text)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
