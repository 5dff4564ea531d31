"""L1, L3, L4, L5 under fire: programs nobody wrote, and whatever may happen between their calls.

The fixed seed guards against regressions; the fresh one looks for what nobody knows yet. It is
printed: LAWS_SEED=number in the environment runs it again.
"""

import multiprocessing
import os
import random
from unittest.mock import MagicMock

import hypothesis
import pytest
import torch
from property.delays import BACKS
from property.grammar import BACKENDS, NAMES, scenarios
from property.machine import LawBroken, follow, run, write_script
from property.transcript import Writer, is_close
from property.twins import (
    DROPPED,
    Back,
    Call,
    Difference,
    Do,
    Figures,
    Scenario,
    check,
    check_twins,
    play,
)

from tripwire.dispatch.dispatcher import Dispatcher

STEPS = 500  # of each seed
FIXED = 2026
FRESH = int(os.environ.get("LAWS_SEED") or random.randrange(10**6))
COMPILED = 0.4  # at least: a machine that tests refusals tests nothing. 51 to 67 were seen


@pytest.mark.parametrize("seed", [FIXED, FRESH], ids=["fixed", "fresh"])
def test_no_program_differs_from_its_compiled_twin(seed, capsys) -> None:
    with capsys.disabled():
        print(f"\nlaw machine, seed {seed}: ", end="", flush=True)
        figures = run(STEPS, seed)
        print(figures)
    assert figures.share > COMPILED


# --- the players themselves ---

CALL = Call("new(4), new(4)", times=2)


def _run_second(dispatcher, *args, **kwargs):
    """What is compiled does what another function of its module does."""
    return dispatcher.target.__globals__["second"](*args, **kwargs)


@pytest.mark.parametrize(
    "other",
    [
        "return x * 3",  # values
        "return (x * 2).double()",  # dtype
        "return (x * 2).expand(2, 4)[0]",  # nothing: same layout, same values
        "return torch.stack([x * 2, x], -1)[:, 0]",  # strides
        "return x.mul_(2)",  # aliasing with an argument
        "return (x * 2).requires_grad_()",  # need for gradients
        "held.append(1); return x * 2",  # state
        "x.add_(0); y.add_(1); return x * 2",  # an argument that is written
        "raise ValueError('no')",  # an exception
        "torch.rand(1); return x * 2",  # the random generator
        "torch.set_default_dtype(torch.float64); return x * 2",  # torch's state
    ],
)
def test_twins_that_differ_are_told_apart(other, monkeypatch) -> None:
    """`call` is another program in the compiled twin: whatever can be seen of that is seen."""
    program = (
        "held = []\ndef first(x, y):\n    return x * 2\n"
        f"def second(x, y):\n    {other}\ncall = first\n"
    )
    monkeypatch.setattr(Dispatcher, "__call__", _run_second)
    if "[0]" in other and "expand" in other:
        check_twins(program, [CALL])
        return
    with pytest.raises(Difference):
        check_twins(program, [CALL])


def test_a_gradient_that_differs_is_told_apart(monkeypatch) -> None:
    program = (
        "def first(x, y): return x * y\ndef second(x, y): return x * y.detach()\ncall = first\n"
    )
    monkeypatch.setattr(Dispatcher, "__call__", _run_second)
    with pytest.raises(Difference):
        check_twins(program, [Call("new(4).requires_grad_(), new(4).requires_grad_()")])


@pytest.mark.parametrize(
    "late",
    [
        "scale = 3.0",  # what a backward reads when it runs
        "Own.backward = staticmethod(lambda ctx, g: g * 5)",
        "w.register_hook(lambda g: g * 7)",
        "outs[0].register_hook(lambda g: g * 7)",
        "w.grad = torch.ones(4)",
    ],
)
def test_what_is_written_before_a_late_backward_counts(late) -> None:
    program = (
        "scale, w = 2.0, nn.Parameter(torch.ones(4))\nclass Own(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, t): return t * 2\n    @staticmethod\n"
        "    def backward(ctx, g): return g * scale\ndef call(x, y): return Own.apply(w * x)\n"
    )
    steps = [Call("new(4), new(4)", late=True), Do(late), Back("total.backward()")]
    *_, written = play(Scenario(program, tuple(steps)))
    *_, otherwise = play(Scenario(program, (steps[0], Do("pass"), steps[2])))
    assert written[0] != otherwise[0]
    for backend in ("eager", "aot_eager"):
        check(Scenario(program, (*steps, *steps), backend))


@pytest.mark.parametrize("text", BACKS)
def test_every_way_to_ask_for_gradients_gives_some_or_lets_results_die(text) -> None:
    program = "w = nn.Parameter(torch.ones(4))\ndef call(x, y): return x * w, w * 2\n"
    seen = "results = [weakref.ref(out) for out in outs]"
    steps = (Call("new(4).requires_grad_(), new(4)", late=True), Do(seen), Back(text))
    *_, (found, _, (world, _)) = play(Scenario(program, steps))
    assert found[0] == ""
    assert "dead" in str(world) if text == DROPPED else str(found).count("torch.float32") > 4


@pytest.mark.parametrize("name", NAMES)
def test_a_production_makes_programs_that_run(name) -> None:
    """Also where it awaits repair: a program that only raises shows nothing."""
    returned = 0

    @hypothesis.seed(0)
    @hypothesis.settings(
        database=None,
        deadline=None,
        max_examples=8,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(scenarios(name))
    def play_plainly(scenario) -> None:
        nonlocal returned
        (raised, *_), *_ = next(play(scenario))
        returned += not raised

    play_plainly()
    assert returned > 2


def test_a_third_of_all_programs_runs_behind_aot_eager() -> None:
    assert BACKENDS.count("aot_eager") * 3 == len(BACKENDS)


def _write(*values):
    return Writer("no world").write([torch.tensor(values)])


def test_only_the_last_bits_may_differ_behind_aot_eager() -> None:
    third = 1 / 3
    assert is_close(_write(third), _write(third + 1e-7))
    assert not is_close(_write(third), _write(third + 1e-5))
    assert not is_close(_write(third), _write(third, third))
    assert not is_close(_write(1), _write(2))
    assert is_close(_write(float("nan")), _write(float("nan")))


def test_sets_are_written_alike_wherever_their_members_are() -> None:
    def write():
        tensors = [torch.ones(2) for _ in range(20)]
        return Writer("no world").write([tensors[0], {*tensors, 1.0, "a"}])

    assert write() == write()


def test_hashes_of_mocks_are_written_alike_unless_they_were_set() -> None:
    def write(*said):
        one = MagicMock()
        hash(one)
        for value in said:
            one.__hash__.return_value = value
        return Writer("no world").write(one)

    assert write() == write()
    assert write(5) == write(5)
    assert write(5) != write(6)
    assert write(5) != write()


def test_calls_of_mocks_are_written_but_how_often_a_hash_was_asked_for() -> None:
    def write(ask):
        one = MagicMock()
        ask(one)
        return Writer("no world").write(one)

    assert write(hash) == write(lambda one: hash((one, one)))
    assert write(lambda one: one()) != write(lambda one: (one(), one()))
    assert write(lambda one: one.gain(1)) != write(lambda one: one.gain(2))


@pytest.mark.parametrize("write", ["scale = 3.0", "scale = 2.0", "beside = 1"])
def test_a_calm_program_has_no_call_but_the_first_that_misses(write) -> None:
    program = "scale = 2.0\ndef call(x, y): return x * scale\n"
    scenario = Scenario(program, (CALL, Do(write), CALL), calm=True)
    if write == "scale = 3.0":
        with pytest.raises(Difference, match="ran no compiled code"):
            check(scenario)
    else:
        check(scenario)


def test_a_script_runs_and_fails_as_the_scenario_did(monkeypatch, tmp_path) -> None:
    program = "def call(x, y): return x * 2\ndef other(x, y): return x * 3\n"
    scenario = Scenario(program, (CALL, Do("y = 1"), CALL))
    monkeypatch.setenv("LAWS_SAVE", str(tmp_path))
    LawBroken(scenario, "because", 5)
    script = (tmp_path / "test_law_5.py").read_text()
    assert script == write_script(scenario, "because", 5)
    space = {"__name__": "saved"}
    exec(script, space)
    space["test_twins_agree"]()
    monkeypatch.setattr("tripwire.compile", lambda call, backend: call.__globals__["other"])
    with pytest.raises(Difference):
        space["test_twins_agree"]()


@pytest.mark.parametrize(
    ("news", "said"),
    [([Figures(steps=10), "a script"], "a script"), ([Figures(steps=9)], "a process died")],
    ids=["told after its share was done", "died before"],
)
def test_what_a_process_of_a_long_run_says_is_not_lost(news, said) -> None:
    mine, theirs = multiprocessing.Pipe(duplex=False)
    for one in news:
        theirs.send(one)
    theirs.close()
    with pytest.raises(SystemExit, match=said):
        list(follow({mine: Figures()}, share=10))
