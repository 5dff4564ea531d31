"""Odd calls: what they depend on is kept, or the record says that it isn't."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from carrying import Carried
from numpy.random import normal, randint
from replaying import check_reproduces, fail, only, raised_in, run_elsewhere
from torch import nn
from torch.utils.hooks import RemovableHandle

import tripwire
from tripwire.recording.capture.record import ExecutionRecord, load_record
from tripwire.recording.format.file import Record
from tripwire.recording.format.manifest import Returned
from tripwire.recording.replay.show import write_repro

# --- the environment ---


def reads_environment(x):
    import os

    if os.environ.get("MY_MODE") == "strict":
        raise ValueError("strict mode")
    return x


def test_a_call_that_fails_because_of_a_variable_is_said_to_differ(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "1")
    monkeypatch.setenv("MY_MODE", "strict")
    fail(tripwire.record_on_error(tmp_path)(reads_environment), torch.ones(1))
    verdict = load_record(only(tmp_path)).manifest.verdict
    assert (verdict.outcome, verdict.text[:19]) == ("differs", "the replay returned")


# --- managers beside a recorded block ---

LOG: list[str] = []


@contextlib.contextmanager
def noting(name: str) -> Iterator[str]:
    LOG.append(f"{name} in")
    try:
        yield name
    finally:
        LOG.append(f"{name} out")


@contextlib.contextmanager
def failing_at_the_end() -> Iterator[None]:
    yield
    raise ValueError("at the end")


def check_fails_again(folder: Path, run: Callable[..., Any], *args: Any) -> Exception:
    """A replay raises the same at the same line, and the source alone would do, too."""
    error = fail(run, *args)
    check_reproduces(only(folder))
    outcome = raised_in(only(folder))
    assert (outcome.type, outcome.message) == (type(error).__name__, str(error))
    with Record.open(only(folder)) as record:
        assert all(code.source for code in record.table.codes)
    return error


def test_managers_after_the_recording_one_are_entered_in_the_replay(tmp_path) -> None:
    def run():
        with (
            tripwire.record_block(tmp_path),
            torch.no_grad(),
            torch.autocast("cpu", torch.bfloat16),
        ):
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            raise ValueError(f"{torch.is_grad_enabled()} {product.dtype}")

    assert str(check_fails_again(tmp_path, run)) == "False torch.bfloat16"


def test_a_manager_that_gives_a_value_gives_it_again(tmp_path) -> None:
    def run(name):
        with (
            noting("first") as a,
            tripwire.record_block(tmp_path),
            noting(name) as b,
            noting(b) as c,
        ):
            raise ValueError(f"{a} {b} {c} {LOG}")

    LOG.clear()
    error = check_fails_again(tmp_path, run, "second")
    assert str(error) == "first second second ['first in', 'second in', 'second in']"


def test_a_header_of_several_lines_keeps_its_lines(tmp_path) -> None:
    def run(x):
        with (
            tripwire.record_block(tmp_path),
            noting("first") as (first),  # a comment
            noting(first) as second,
            (third := noting("third")),
        ):
            # another
            text = """in
two lines"""
            raise ValueError(f"{second} {text} {third is None} {x}")  # fmt: skip

    check_fails_again(tmp_path, run, 1)


def test_a_manager_that_fails_itself_fails_again(tmp_path) -> None:
    def begins():
        with tripwire.record_block(tmp_path / "begins"), open("/no/such/file"):
            pass

    def ends():
        with tripwire.record_block(tmp_path / "ends"), failing_at_the_end():
            pass

    check_fails_again(tmp_path / "begins", begins)
    check_fails_again(tmp_path / "ends", ends)


def test_a_manager_that_swallows_the_exception_swallows_it_again(tmp_path) -> None:
    with tripwire.record_block(tmp_path), contextlib.suppress(ValueError):
        raise ValueError("never seen")
    assert isinstance(check_reproduces(only(tmp_path)).manifest.outcome, Returned)


def test_a_block_on_one_line_with_another_manager(tmp_path) -> None:
    def run(x):
        with tripwire.record_block(tmp_path), torch.no_grad(): x.mul(2).backward()  # fmt: skip  # noqa: E701

    check_fails_again(tmp_path, run, torch.ones(1, requires_grad=True))


def test_a_block_in_a_finally_clause_has_its_managers(tmp_path) -> None:
    def run(x):
        try:
            int("x")
        finally:
            with noting("before"), tripwire.record_block(tmp_path), torch.no_grad():
                raise TypeError(torch.is_grad_enabled())

    check_fails_again(tmp_path, run, 1)


def program(folder: Path, text: str) -> Callable[[], None]:
    """What runs the lines of a file."""
    (folder / "program.py").write_text(text)
    space = {"tripwire": tripwire, "torch": torch, "folder": folder / "records"}
    code = compile(text, str(folder / "program.py"), "exec")
    return lambda: exec(code, {**space, "__name__": "program"})


BODY = "n = 2\n{t}raise ValueError(f'{{n}} {{torch.is_grad_enabled()}}')\n"
HEADER = "with tripwire.record_block(folder), torch.no_grad():\n"


@pytest.mark.parametrize(
    "above, indent", [("\n\n", "    "), ("\n\n", "  "), ("if 1:\n\t\n", "\t\t")]
)
def test_a_module_level_block_with_another_manager(above, indent, tmp_path) -> None:
    outer = "\t" if indent == "\t\t" else ""
    text = above + outer + HEADER + indent + BODY.format(t=indent)
    error = check_fails_again(tmp_path / "records", program(tmp_path, text))
    assert str(error) == "2 False"
    assert raised_in(only(tmp_path / "records")).line == 5


@pytest.mark.parametrize("above, indent", [("", "    "), ("\n\n", " "), ("\n\n", "\t")])
def test_a_header_for_which_there_is_no_room_is_refused(above, indent, tmp_path) -> None:
    error = fail(program(tmp_path, above + HEADER + indent + BODY.format(t=indent)))
    assert isinstance(error, tripwire.BadOption)
    advice = "Nest the with statements" if above else "Put an empty line above it"
    assert advice in str(error)


# --- generators of NumPy's ---

KINDS = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)


def draw_by_name(x):
    return [randint(1000), normal(), int(np.random.randint(1000))]


def draw(rng, *others):
    """What a generator gives next; it may have half of a pair in store."""
    return [rng.standard_normal(), *(other.standard_normal() for other in others)]


def spawn(rng):
    return [child.integers(1000) for child in rng.spawn(2)]


def failing(call):
    """Fails with what a call gives."""

    def fails(*args):
        raise ValueError(call(*args))

    return fails


def check_reproduced(folder: Path, call: Callable[..., Any], *args: Any) -> ExecutionRecord:
    """A call that fails with what it sees sees it again, and nothing is left out."""
    fail(tripwire.record_on_error(folder)(failing(call)), *args)
    record = check_reproduces(only(folder))
    assert not record.manifest.omissions
    return record


def test_a_function_of_numpys_generator_that_was_imported_by_name(tmp_path) -> None:
    check_reproduced(tmp_path, draw_by_name, torch.ones(1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_goes_on_from_where_it_was(kind, tmp_path) -> None:
    rng = np.random.Generator(kind([3, 5]))
    rng.integers(10, dtype=np.int32)  # half of a word is left
    check_reproduced(tmp_path, draw, rng, np.random.RandomState(kind(4)))


def test_an_old_generator_keeps_the_number_that_it_has_in_store(tmp_path) -> None:
    state = np.random.RandomState(3)
    state.standard_normal()
    assert state.get_state(legacy=False)["has_gauss"]
    check_reproduced(tmp_path, draw, state)


def test_generators_that_share_their_source_share_it_again(tmp_path) -> None:
    source = np.random.PCG64(3)
    check_reproduced(tmp_path, draw, np.random.Generator(source), np.random.Generator(source))


def test_what_a_generator_spawns_is_the_same_again(tmp_path) -> None:
    rng = np.random.default_rng([1, 2])
    rng.spawn(3)
    check_reproduced(tmp_path, spawn, rng)


def test_a_method_of_a_generator_and_a_global_one(tmp_path) -> None:
    check_reproduced(tmp_path, lambda take: [take(1000), GLOBAL_RNG.integers(1000)], LOCAL_TAKE)


GLOBAL_RNG = np.random.default_rng(1)
LOCAL_TAKE = np.random.default_rng(2).integers


def test_a_later_call_that_draws_has_the_state_from_before_it(tmp_path) -> None:
    rng = np.random.default_rng(3)

    @tripwire.record_on_error(tmp_path)
    def run(fails):
        drawn = rng.integers(1000)
        if fails:
            raise ValueError(drawn)

    run(False)
    fail(run, True)
    check_reproduces(only(tmp_path))


# --- hooks ---


def add_hook(model, x):
    model.register_forward_hook(lambda module, args, result: result * 2)
    raise ValueError(f"{model(x).tolist()} {len(model._forward_hooks)}")


def test_a_hook_that_the_call_registers_stands_beside_those_before(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    model = nn.Linear(2, 2, bias=False)
    model.register_forward_hook(lambda module, args, result: result + 100)
    fail(tripwire.record_on_error(tmp_path)(add_hook), model, torch.ones(2))
    RemovableHandle.next_id = 0
    check_reproduces(only(tmp_path))
    assert RemovableHandle.next_id == 2
    script, _ = write_repro(only(tmp_path))
    assert "RemovableHandle.next_id = 1\n" in script


# --- pickle ---

PICKLES = """\
import pickle, sys, torch, tripwire
from shapes import Square

class Item:
    value = 3

def helper():
    return 5

items = [Item(), Square(), helper, Item]
gone = helper

def dump(x):
    again = pickle.loads(pickle.dumps(items))
    kinds = [type(one).__name__ for one in again]
    raise ValueError(f"{kinds} {again[0].value} {again[1].area()} {again[2]()}")

def missing(x):
    return gone() + helper()

for name in ("dump", "missing"):
    if name == "missing":
        del helper
    try:
        tripwire.record_on_error(f"{sys.argv[1]}/{name}", check=False)(globals()[name])(1)
    except (ValueError, NameError) as error:
        print(error)
"""
SHAPES = """\
class Square:
    def area(self):
        return 9
"""


@pytest.fixture(scope="module")
def pickled(tmp_path_factory) -> Path:
    """Records of a program that is gone."""
    home, records = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("records")
    (home / "program.py").write_text(PICKLES)
    (home / "shapes.py").write_text(SHAPES)
    done = run_elsewhere("program.py", records, cwd=home)
    assert "['Item', 'Square', 'function', 'type'] 3 9 5" in done.stdout
    return records


def test_what_the_user_defined_can_be_pickled_in_a_replay(pickled) -> None:
    main = sys.modules["__main__"]
    check_reproduces(only(pickled / "dump"))
    assert sys.modules["__main__"] is main
    assert "shapes" not in sys.modules


def test_a_name_that_code_misses_is_missed_again(pickled) -> None:
    assert raised_in(only(pickled / "missing")).type == "NameError"
    check_reproduces(only(pickled / "missing"))


# --- caches ---


def test_results_in_a_cache_are_told_as_left_out() -> None:
    @functools.lru_cache
    def square(n):
        return n * n

    assert not Carried(value=square).left_out
    square(2)
    assert "1 cached result" in str(Carried(value=square).left_out)
    square(3)
    assert "2 cached results" in str(Carried(value=square).left_out)


# --- what a replay leaves behind ---


def test_a_replay_leaves_the_generators_of_the_process_alone(tmp_path) -> None:
    def draws():
        return torch.rand(1).item(), random.random(), np.random.rand()

    def seed(number: int) -> None:
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)

    seed(0)
    fail(tripwire.record_on_error(tmp_path)(failing(draws)))
    seed(1)
    expected = draws()
    seed(1)
    check_reproduces(only(tmp_path))
    assert torch.initial_seed() == 1
    assert draws() == expected
