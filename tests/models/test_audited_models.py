"""The audit of models: whatever a call could read is written, and compiled code follows.

A sample of the places in each test run; a larger one of all architectures by `make soak`.
"""

from __future__ import annotations

import pytest
import torch
from models.architectures import ARCHITECTURES
from models.handmade import HANDMADE
from models.libraries import LIBRARIES

from tripwire import Audit, Auditor, Status, compile

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ROWS = {row.name: row for row in (*HANDMADE, *LIBRARIES, *ARCHITECTURES)}
# Few places and small models, so that a test takes a second or two.
FEW = [
    "autoencoder",
    "cnn",
    "denoiser",
    "graph-net",
    "reader",
    "tied",
    "unet",
    "cross-attention",
    "diffusers-unet",
    "inception",
    "mobilenet",
    "nn-transformer",
    "resnet",
]
# Sizes that values decide on, which AOTAutograd does not take: "eager" alone.
UNSIZED = frozenset({"detector", "mixture"})
PLACES = {"eager": 14, "aot_eager": 4}
MORE_PLACES = {"eager": 60, "aot_eager": 20}


def audit(name: str, backend: str, places: int, *, seed: int = 0, gradients: bool = False) -> Audit:
    row = ROWS[name]
    compiled = compile(row.build(), backend=backend)
    with torch.set_grad_enabled(gradients):
        return Auditor(places=places, seed=seed, gradients=gradients).audit(
            compiled, **row.inputs()
        )


@pytest.mark.parametrize("backend", PLACES)
@pytest.mark.parametrize("name", FEW)
def test_compiled_models_follow_every_write(name: str, backend: str) -> None:
    found = audit(name, backend, PLACES[backend])
    assert found.ok, str(found)
    assert found.count()[Status.REFUSED] < PLACES[backend] // 2


@pytest.mark.parametrize("name", ["autoencoder", "cross-attention"])
def test_gradients_follow_every_write(name: str) -> None:
    found = audit(name, "eager", 14, gradients=True)
    assert found.ok, str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        (name, backend)
        for name in ROWS
        for backend in MORE_PLACES
        if backend == "eager" or name not in UNSIZED
    ],
)
def test_compiled_models_follow_many_writes(name: str, backend: str) -> None:
    found = audit(name, backend, MORE_PLACES[backend], seed=1)
    assert found.ok, str(found)
