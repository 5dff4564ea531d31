"""What Inductor compiled runs in another process without the compiler, and as it did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import run_python

PROGRAMS = """
import json, sys, warnings
import torch
from torch import nn
from torch.nn import functional as F

warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out((q @ k.mT).softmax(-1) @ v) + F.gelu(x)


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x))).mean((2, 3))


def draw(x):
    return F.dropout(x, 0.5) + torch.rand(4)


def run(model, x, training):
    torch.manual_seed(1)
    with torch.set_grad_enabled(training):
        y = model(x)
        if not training:
            return [y]
        y.sum().backward()
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad()
        return [y.detach(), *gradients]


import tripwire

PROGRAMS = {
    "training": (Attention(), torch.randn(2, 4, 8)),
    "a convolution": (Image().eval(), torch.randn(2, 3, 8, 8)),
    "drawing": (draw, torch.randn(4, 4)),
}
found = {}
for name, (model, x) in PROGRAMS.items():
    compiled = tripwire.compile(model, backend="inductor", fullgraph=True)
    training = name == "training"
    results = [run(compiled, x, training) for _ in range(3)]
    if name != "drawing":  # Inductor draws other numbers than plain torch
        for result in results:
            torch.testing.assert_close(result, run(model, x, training), rtol=1e-4, atol=1e-4)
    told = [tensor.double().flatten().tolist() for tensor in results[-1]]
    found[name] = compiled.statistics().hits, told
compiler = ("compile_fx", "lowering", "ir", "graph", "select_algorithm", "debug", "decomposition")
imported = [name for name in compiler if f"torch._inductor.{name}" in sys.modules]
print(json.dumps([found, imported]))
"""


def run_programs(folder: Path, **environment: str) -> tuple[dict, list[str]]:
    """What the programs return, and what they imported of the compiler."""
    folders = {"TRIPWIRE_CACHE_DIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch")}
    found, imported = json.loads(run_python(PROGRAMS, {**folders, **environment}).splitlines()[-1])
    return found, imported


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    return folder, *run_programs(folder)


def test_code_in_the_store_runs_as_it_did_without_the_compiler_and_without_gcc(cold) -> None:
    folder, found, imported = cold
    assert "compile_fx" in imported
    assert {name: hits for name, (hits, _) in found.items()} == dict.fromkeys(found, 2)
    assert run_programs(folder, PATH="/nowhere") == (found, [])


def test_a_library_that_is_gone_or_damaged_is_built_again(cold) -> None:
    folder, found, _ = cold
    gone, damaged, *_ = sorted((folder / "torch").rglob("*.main.so"))
    gone.unlink()
    damaged.write_bytes(b"no library")
    assert run_programs(folder)[0] == found
    assert gone.exists()
    assert damaged.stat().st_size > 1000
