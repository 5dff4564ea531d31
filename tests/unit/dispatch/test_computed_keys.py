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


# --- keys that are tensors ---------------------------------------------------------------------

BY_TENSORS = {
    "a velocity for each weight": """
weights = [T(1), T(2)]
velocity = {w: torch.zeros(2) for w in weights}

def call(g):
    for w in weights:
        velocity[w] = 0.5 * velocity[w] + g
        w -= 0.25 * velocity[w]
    return sum(weights)

def go(f, see):
    for n in range(6):
        see(f(T(n)), weights, list(velocity.values()))
""",
    "filled by the first call": """
weights = [T(1), T(2)]
velocity = collections.defaultdict(dict)

def call(g):
    for w in weights:
        state = velocity[w]
        state["n"] = state.get("n", 0) + 1
        state["sum"] = g if "sum" not in state else state["sum"] + g
        w -= state["sum"] / state["n"]
    return sum(weights)

def go(f, see):
    for n in range(7):
        see(f(T(n)), weights, list(velocity.values()))
""",
    "one key or the other, deleted and put back": """
one, other = nn.Parameter(T(1)), T(2)
held = {}

def call(x, key):
    if key not in held:
        held[key] = torch.zeros(2)
    held[key] = held[key] * 0.5 + x
    return sum(held.values())

def go(f, see):
    for n in range(10):
        see(f(T(n), (one, other)[n // 3 % 2]), list(held.values()))
    del held[other]
    for n in range(3):
        see(f(T(n), other), list(held.values()))
    held.clear()
    for n in range(4):
        see(f(T(n), one), list(held.values()))
""",
    "numbers": """
one, other = T(1), T(2)
held = {one: 0, other: 1.0}

def call(x):
    held[one] += 1
    held[other] = held[other] * 0.5
    return x * held[other] + held[one]

def go(f, see):
    for n in range(6):
        see(f(T(n)), held[one], held[other])
    held[one] = 50
    see(f(T()), held[one]), see(f(T()), held[one])
    held[one], held[other] = 3, 8.0
    see(f(T()), held[one]), see(f(T()), held[one])
""",
    "the keys are used as well": """
one, other = T(1), T(2)
held = {one: T(3), other: T(4)}

def call(x):
    total = x
    for key in held:
        held[key] = held[key] + key
        key.mul_(2)
        total = total + held[key] * key
    return total

def go(f, see):
    for n in range(5):
        see(f(T(n)), one, other, list(held.values()))
    held[one] = T(9)
    see(f(T()), list(held.values())), see(f(T()), list(held.values()))
    one.zero_()
    see(f(T()), list(held.values())), see(f(T()), list(held.values()))
""",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BY_TENSORS)
def test_what_lies_under_a_tensor_is_another_than_the_tensor(name, backend, tmp_path) -> None:
    check_twins(BY_TENSORS[name], backend, tmp_path, hits=4)
