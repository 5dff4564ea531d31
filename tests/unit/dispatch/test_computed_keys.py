"""What a call only stores in a dict, under computed keys, may be thrown away by other code."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.dispatch.sidebyside import BACKENDS, check_twins

STORES = {  # name: what a call does, how the dict is made, what happens between calls, hits
    "emptied": ("D[name] = x * 2", "{}", "D.clear()", 11),
    "emptied now and then": ("D[name] = x * 2", "{}", "D.clear() if i % 3 == 2 else None", 11),
    "in an order": (
        "D[name] = x; D[name + '2'] = x * 3",
        "{}",
        "(D.clear(), D.update(k2=0)) if i % 3 == 2 else None",
        11,
    ),
    "in a loop": ("for j in range(3): D[j] = x * j", "{}", "D.clear()", 11),
    "in an OrderedDict": ("D[name] = x", "collections.OrderedDict()", "D.clear()", 11),
    # What is stored is there already, so the run shows no write.
    "the same tensor": ("D[name] = W", "{}", "D.clear() if i % 3 == 2 else None", 8),
    "the same number": ("D[name] = 1", "{}", "D.update(k=5) if i % 3 == 2 else None", 8),
    # What is read is state.
    "read before": (
        "x = x + D.get('k', W); D[name] = x",
        "{}",
        "D.clear() if i % 3 == 2 else None",
        4,
    ),
    "read after": ("D[name] = x * 3; x = x + D['k']", "{}", "D.clear() if i % 3 == 2 else None", 4),
    "read by another name": (
        "x = x + E.get('k', W); D[name] = x",
        "{}",
        "D.clear() if i % 3 == 2 else None",
        4,
    ),
    "counted": ("D[name] = x; x = x * len(D)", "{}", "D.clear() if i % 3 == 2 else None", 4),
    "looked for": (
        "x = x * 2 if name in D else x; D[name] = x",
        "{}",
        "D.clear() if i % 3 == 2 else None",
        4,
    ),
    "a list's places": ("D[at - 1] = x", "[0]", "D.append(i) if i % 3 == 2 else None", 0),
    "an object's names": (
        "K.__dict__[name] = x * 3; x = x * K.n",
        "K.__dict__",
        "setattr(K, 'n', i // 3)",
        4,
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", STORES)
def test_what_is_stored_under_a_computed_key(case: str, backend: str, tmp_path: Path) -> None:
    body, made, between, hits = STORES[case]
    program = f"""
W = torch.tensor([2.0, 3.0])
K = types.SimpleNamespace(n=1)
D = E = {made}
name, at = "k", 0
def call(x):
    {body.replace("; ", chr(10) + "    ")}
    return x + 1
def go(f, see):
    for i in range(12):
        see(f(T(i)), list(D.items()) if hasattr(D, "items") else D)
        {between}
"""
    check_twins(program, backend, tmp_path, hits=hits)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_that_collect_features_into_a_dict_that_is_emptied(
    backend: str, tmp_path: Path
) -> None:
    program = """
features = {}
def collecting(name):
    def hook(module, args, output):
        features[name] = output.detach()
    return hook
torch.manual_seed(0)
call = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
call[0].register_forward_hook(collecting("first"))
call[2].register_forward_hook(collecting("last"))
def go(f, see):
    for i in range(6):
        features.clear()
        see(f(T(i)), features)
"""
    check_twins(program, backend, tmp_path, hits=5)
