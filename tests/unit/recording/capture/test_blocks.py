"""Blocks: `with tripwire.record_block(path)` around some lines, wherever they stand."""

from __future__ import annotations

import asyncio
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from replaying import check_reproduces, fail, only, raised_in, run_elsewhere
from torch import nn

import tripwire
from tripwire.recording.capture.record import load_record
from tripwire.recording.format.manifest import Returned
from tripwire.recording.replay.show import write_repro

OFFSET = torch.tensor([10.0])


def line_of(error: BaseException) -> int:
    """Where in this file an exception was raised."""
    at, line = error.__traceback__, 0
    while at is not None:
        if at.tb_frame.f_code.co_filename == __file__:
            line = at.tb_lineno
        at = at.tb_next
    return line


def check_failed(path: Path, error: Exception) -> None:
    """The record shows the exception, at its line."""
    check_reproduces(path)
    outcome = raised_in(path)
    assert (outcome.type, outcome.message) == (type(error).__name__, str(error))
    assert outcome.line == line_of(error)


def test_a_block_that_fails_leaves_a_record_and_raises(tmp_path) -> None:
    def run(x):
        with tripwire.record_block(tmp_path):
            y = x + OFFSET
            y.reshape(3)

    error = fail(run, torch.ones(2))
    check_failed(only(tmp_path), error)
    assert only(tmp_path).name.startswith("block_RuntimeError_")


def test_a_block_that_succeeds_leaves_a_record_too(tmp_path) -> None:
    x = torch.ones(2)
    with tripwire.record_block(tmp_path / "b.rec") as recording:
        y = x + OFFSET
    assert y.tolist() == [11.0, 11.0]
    assert recording.path == tmp_path / "b.rec"
    assert isinstance(check_reproduces(recording.path).manifest.outcome, Returned)


def test_what_the_block_changes_is_recorded_as_it_was(tmp_path) -> None:
    items, x = [1], torch.zeros(2)

    def run():
        with tripwire.record_block(tmp_path):
            items.append(2)
            x.add_(1)
            raise ValueError(f"{items} {x.tolist()}")

    error = fail(run)
    check_failed(only(tmp_path), error)
    assert items == [1, 2]


def test_a_block_on_one_line_is_recorded(tmp_path) -> None:
    def run(x):
        with tripwire.record_block(tmp_path): x.reshape(5)  # fmt: skip  # noqa: E701

    error = fail(run, torch.ones(2))
    check_failed(only(tmp_path), error)


def test_a_block_with_a_header_of_several_lines(tmp_path) -> None:
    def run(x):
        with tripwire.record_block(
            tmp_path,
            tensors="full",
        ):
            # A comment comes first.
            y = x * 2

            y.reshape(5)

    error = fail(run, torch.ones(2))
    check_failed(only(tmp_path), error)


def test_a_block_beside_another_manager_is_recorded_inside_it(tmp_path) -> None:
    def run(x):
        with torch.no_grad(), tripwire.record_block(tmp_path):
            raise ValueError(f"{torch.is_grad_enabled()} {(x * 2).requires_grad}")

    error = fail(run, torch.ones(2, requires_grad=True))
    assert str(error) == "False False"
    check_failed(only(tmp_path), error)


def test_a_block_in_a_loop_leaves_a_record_each_time(tmp_path) -> None:
    for number in range(3):
        with tripwire.record_block(tmp_path):
            torch.ones(number)
    assert len(list(tmp_path.iterdir())) == 3


def test_blocks_inside_each_other_each_leave_a_record(tmp_path) -> None:
    def run(x):
        with tripwire.record_block(tmp_path / "outer"):
            y = x + 1
            with tripwire.record_block(tmp_path / "inner"):
                y.add_(1)
                y.reshape(7)

    error = fail(run, torch.ones(2))
    check_failed(only(tmp_path / "inner"), error)
    check_failed(only(tmp_path / "outer"), error)


def test_a_return_inside_a_block(tmp_path) -> None:
    def run(x):
        with tripwire.record_block(tmp_path):
            if x.sum() > 0:
                return x * 2
            raise ValueError("negative")

    assert run(torch.ones(1)).tolist() == [2.0]
    check_reproduces(only(tmp_path))
    only(tmp_path).unlink()
    error = fail(run, -torch.ones(1))
    check_failed(only(tmp_path), error)


def test_a_block_that_reads_a_closure(tmp_path) -> None:
    scale = torch.tensor([3.0])

    def run(x):
        with tripwire.record_block(tmp_path):
            raise ValueError((x * scale).tolist())

    error = fail(run, torch.ones(1))
    check_failed(only(tmp_path), error)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.calls = 0

    def forward(self, x):
        with tripwire.record_block(self.folder):
            self.calls += 1
            y = self.scaled(x)
            raise ValueError(f"{self.calls} {y.tolist()}")

    def scaled(self, x):
        return x * self.weight


def test_a_block_that_reads_self(tmp_path) -> None:
    layer = Layer()
    layer.folder = str(tmp_path)
    error = fail(layer, torch.ones(1))
    check_failed(only(tmp_path), error)


def test_a_block_that_deletes_and_assigns_its_variables(tmp_path) -> None:
    def run(x):
        y = x
        with tripwire.record_block(tmp_path):
            x = y + 1
            del y
            total = sum(value for value in x.tolist())
            raise ValueError(total)

    error = fail(run, torch.ones(2))
    check_failed(only(tmp_path), error)


def test_a_block_that_defines_functions_and_classes(tmp_path) -> None:
    def run(x):
        with tripwire.record_block(tmp_path):

            class Holder:
                value = 3

            def add(y):
                return y + Holder.value

            for item in add(x).tolist():
                raise ValueError(item)

    error = fail(run, torch.ones(1))
    check_failed(only(tmp_path), error)


def test_a_text_of_several_lines_inside_a_block_stays_as_it_is(tmp_path) -> None:
    def run():
        with tripwire.record_block(tmp_path):
            text = """first
    second
"""
            raise ValueError(text)

    error = fail(run)
    check_failed(only(tmp_path), error)


def test_a_loop_inside_a_block_may_break_and_continue(tmp_path) -> None:
    def run(x):
        with tripwire.record_block(tmp_path):
            for number in range(5):
                if number < 2:
                    continue
                break
            raise ValueError(number)

    error = fail(run, torch.ones(1))
    check_failed(only(tmp_path), error)


def test_a_function_inside_a_block_may_yield(tmp_path) -> None:
    def run():
        with tripwire.record_block(tmp_path):

            def numbers():
                yield 1
                yield 2

            raise ValueError(list(numbers()))

    error = fail(run)
    check_failed(only(tmp_path), error)


TIMES = 0


def test_a_block_that_assigns_to_a_global(tmp_path) -> None:
    def count():
        return TIMES

    def run():
        global TIMES
        with tripwire.record_block(tmp_path):
            TIMES = TIMES + 1
            raise ValueError(count())

    error = fail(run)
    check_failed(only(tmp_path), error)


def test_a_block_that_begins_with_a_decorator(tmp_path) -> None:
    def run(x):
        with tripwire.record_block(tmp_path):

            @torch.no_grad()
            def double(y):
                return y * 2

            raise ValueError(double(x).requires_grad)

    error = fail(run, torch.ones(1, requires_grad=True))
    assert str(error) == "False"
    check_failed(only(tmp_path), error)


class Private(Layer):
    __secret = 3

    def forward(self, x):
        with tripwire.record_block(self.folder):
            return x * self.__secret

    def scaled(self, x):
        with tripwire.record_block(self.folder):
            return super().scaled(x)


@pytest.mark.parametrize("name", ["forward", "scaled"])
def test_a_block_that_means_something_else_in_a_function_is_refused(name, tmp_path) -> None:
    layer = Private()
    layer.folder = str(tmp_path)
    assert isinstance(fail(getattr(layer, name), torch.ones(1)), tripwire.BadOption)


def test_only_what_the_body_reads_is_recorded(tmp_path) -> None:
    used, unused = torch.ones(1), torch.ones(1)
    with tripwire.record_block(tmp_path) as recording:
        used + 1
    assert load_record(recording.path).kwargs.keys() == {"used"}
    assert unused is not None


def test_a_block_that_breaks_out_of_a_loop_is_refused(tmp_path) -> None:
    def run():
        for _ in range(2):
            with tripwire.record_block(tmp_path):
                break

    error = fail(run)
    assert isinstance(error, tripwire.BadOption)
    assert error.slug == "not-recordable"
    assert not list(tmp_path.iterdir())


def test_a_block_that_yields_is_refused(tmp_path) -> None:
    def run():
        with tripwire.record_block(tmp_path):
            yield 1

    error = fail(lambda: next(run()))
    assert isinstance(error, tripwire.BadOption)
    assert "at line" in str(error)


def test_a_block_that_awaits_is_refused(tmp_path) -> None:
    async def run():
        with tripwire.record_block(tmp_path):
            await asyncio.sleep(0)

    assert isinstance(fail(lambda: asyncio.run(run())), tripwire.BadOption)


def test_a_block_without_source_is_refused(tmp_path) -> None:
    text = "with tripwire.record_block(path):\n    pass\n"
    space: dict[str, Any] = {"tripwire": tripwire, "path": tmp_path}
    error = fail(lambda: exec(text, space))
    assert isinstance(error, tripwire.BadOption)
    assert "can't be found" in str(error)


def test_a_block_that_is_interrupted_leaves_nothing(tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt), tripwire.record_block(tmp_path):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_trouble_with_a_block_is_logged(caplog, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with tripwire.record_block(tmp_path / "file") as recording:
        pass
    assert recording.path is None
    assert "could not be recorded" in caplog.text


def test_a_block_leaves_no_mode_behind(tmp_path) -> None:
    depth = torch._C._len_torch_function_stack()
    with tripwire.record_block(tmp_path):
        assert torch._C._len_torch_function_stack() == depth + 1
    assert torch._C._len_torch_function_stack() == depth


def test_a_compiled_call_in_a_block_is_compiled_and_fails_as_it_would(tmp_path) -> None:
    def branch(x):
        y = torch.rand(1) + x
        return y if y.sum() > 0 else -y

    compiled = tripwire.compile(branch, fullgraph=True)

    def run(x):
        with tripwire.record_block(tmp_path):
            compiled(x)

    error = fail(run, torch.ones(1))
    assert isinstance(error, tripwire.CannotTrace)
    check_reproduces(only(tmp_path))


PROGRAM = """\
import sys, torch, tripwire

scale = torch.tensor([2.0])

def double(x):
    return x * scale

x = torch.ones(3)
with tripwire.record_block(sys.argv[1], check=False):
    scale = scale + 1
    y = double(x)
    raise ValueError(y.tolist())
"""


def test_a_block_at_module_level_is_recorded(tmp_path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "program.py").write_text(PROGRAM)
    done = run_elsewhere("program.py", tmp_path / "records", cwd=home, code=1)
    assert "tripwire recorded this call" in done.stderr
    path = only(tmp_path / "records")
    (home / "program.py").unlink()
    check_reproduces(path)
    assert raised_in(path).line == 12
    assert raised_in(path).message == "[3.0, 3.0, 3.0]"


def run_cell(text: str, **space: object) -> Exception:
    """Run a cell of a notebook, which must raise."""
    lines = text.splitlines(keepends=True)
    linecache.cache[CELL] = (len(text), None, lines, CELL)
    return fail(lambda: exec(compile(text, CELL, "exec"), {"tripwire": tripwire, **space}))


CELL = "<ipython-input-1>"


@pytest.mark.parametrize("header", ["", "torch.no_grad(), "])
@pytest.mark.parametrize("body", ["y = x * 2; y.reshape(3)", "\n    y = x * 2\n    y.reshape(3)\n"])
def test_a_block_in_the_first_line_of_a_cell_is_recorded(header, body, tmp_path) -> None:
    text = f"with {header}tripwire.record_block(path):{body}"
    error = run_cell(text, path=tmp_path, x=torch.ones(2), torch=torch)
    record = check_reproduces(only(tmp_path))
    assert raised_in(only(tmp_path)).message == str(error)
    assert raised_in(only(tmp_path)).line == len(text.splitlines())
    assert "y = x * 2" in record.sources[f"<block in {CELL}>"]
    script, why = write_repro(only(tmp_path))
    assert why == ""
    compile(script, "script", "exec")
    assert not run_elsewhere("-c", script, cwd=tmp_path, code=1).stdout


def test_a_block_in_the_first_line_before_other_managers_needs_a_line_above(tmp_path) -> None:
    text = "with tripwire.record_block(path), torch.no_grad():\n    y = 1\n    y / 0\n"
    refused = run_cell(text, path=tmp_path, torch=torch)
    assert "Put an empty line above it" in str(refused)
    run_cell(f"\n{text}", path=tmp_path, torch=torch)
    check_reproduces(only(tmp_path))
    assert raised_in(only(tmp_path)).line == 4


def test_a_program_whose_source_nobody_has_is_refused_clearly() -> None:
    text = "import tripwire\nexec('with tripwire.record_block(\"x\"):\\n    pass')\n"
    done = run_elsewhere("-c", text, cwd=Path(sys.prefix), code=1)
    assert "not-recordable" in done.stderr
