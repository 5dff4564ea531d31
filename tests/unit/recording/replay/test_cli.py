"""The command line: 0 done, 1 the replayed call ended differently, 2 bad input, in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import types

import pytest
import torch
from click.testing import CliRunner, Result
from replaying import fail, run_elsewhere

import tripwire
from tripwire.cli import main
from tripwire.recording.capture.record import load_record

OFFSET = torch.tensor([1.0])


def divide(x, by):
    return (x + OFFSET).sum().item() / by


def branch(x):
    y = torch.rand(1) + x
    return y if y.sum() > 0 else -y


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def failed(tmp_path):
    return tripwire.record_call(tmp_path / "failed.rec")(divide, torch.ones(2), 0)


@pytest.fixture
def returned(tmp_path):
    return tripwire.record_call(tmp_path / "returned.rec")(divide, torch.ones(2), 2)


@pytest.fixture
def refused(tmp_path):
    compiled = tripwire.compile(branch, fullgraph=True)
    return tripwire.record_call(tmp_path / "refused.rec")(compiled, torch.ones(1))


def interrupted(*given):
    raise KeyboardInterrupt


# --- show ---


def test_show_tells_what_was_called_and_how_it_ended(failed) -> None:
    done = call("show", failed)
    assert done.exit_code == 0
    for text in ("divide at ", "ZeroDivisionError: float division by zero", "float32 (2,)"):
        assert text in done.output
    assert "not checked" in done.output
    assert "OFFSET" in done.output


def test_show_tells_how_it_was_compiled(refused) -> None:
    assert "back end eager, fullgraph" in call("show", refused).output


def test_show_tells_what_was_left_out(tmp_path) -> None:
    recorded = tripwire.record_on_error(tmp_path, tensors="shape")(divide)
    with pytest.raises(ZeroDivisionError):
        recorded(torch.ones(2), 0)
    done = call("show", next(tmp_path.iterdir()))
    assert "left out: args[0]: values left out by policy: shape only" in done.output


@pytest.mark.parametrize("columns", ["40", "80"])
def test_show_cuts_no_line_however_narrow_the_terminal_is(columns, tmp_path, monkeypatch) -> None:
    def fails(name):
        raise ValueError("word " * 40 + "x" * 100)

    monkeypatch.setenv("COLUMNS", columns)
    lines = call("show", tripwire.record_call(tmp_path)(fails, "y" * 90)).output.splitlines()
    (outcome,) = (line for line in lines if line.startswith("outcome "))
    assert outcome.endswith(f"{'x' * 100} ({__file__}:{fails.__code__.co_firstlineno + 1})")
    (name,) = (line for line in lines if line.startswith(" name "))
    assert name.endswith(f"'{'y' * 90}'")


@dataclasses.dataclass
class Config:
    limit: int
    scale: object
    inner: object = None


class Many:
    def __init__(self) -> None:
        self.__dict__ = dict.fromkeys("abcdefghi", 1)


class Items(list):
    pass


def look(value):
    """Looks at nothing, but a record has the attributes that its code names."""
    return value is None and (
        value.a, value.b, value.c, value.d, value.e, value.f, value.g, value.h, value.i
    )  # fmt: skip


CONFIG = f"{__name__}.Config"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Config(3, torch.ones(2)), f"{CONFIG}(limit=3, scale=float32 (2,), inner=None)"),
        ([Config(3, {"a": "b"})], f"[{CONFIG}(limit=3, scale={{'a': 'b'}}, inner=None)]"),
        (
            Config(3, 1, Config(4, 2)),
            f"{CONFIG}(limit=3, scale=1, inner=<object of <class {CONFIG}> with 3 attributes>)",
        ),
        (Many(), f"<object of <class {__name__}.Many> with 9 attributes>"),
        (Items([1, 2]), f"{__name__}.Items([1, 2])"),
        (threading.Lock(), "<missing _thread.lock: part of its state is in C, where Python"),
        (types.SimpleNamespace(a=1), "types.SimpleNamespace(a=1)"),
    ],
    ids=["tensor", "list", "nested", "many", "subclass", "lock", "namespace"],
)
def test_show_prints_the_attributes_of_small_objects_one_level_deep(tmp_path, value, shown) -> None:
    path = tripwire.record_call(tmp_path)(look, value)
    assert f" value  {shown}" in call("show", path).output
    assert repr(load_record(path).locals).startswith(f"{{'value': {shown}")


def test_an_object_that_leads_to_itself_is_shown(tmp_path) -> None:
    ring = Config(1, [])
    ring.scale.append(ring)
    path = tripwire.record_call(tmp_path)(lambda value: 1, ring)
    assert "limit=1, scale=[<object of <class" in repr(load_record(path).locals)


def test_an_exception_without_a_message_is_shown_without_a_colon(tmp_path) -> None:
    path = tripwire.record_call(tmp_path)(fail_silently)
    assert f"outcome       ValueError ({__file__}:" in call("show", path).output


def fail_silently():
    raise ValueError


def test_show_source_says_if_there_is_none(tmp_path) -> None:
    space: dict = {}
    exec("def f():\n    return 1", space)
    path = tripwire.record_call(tmp_path)(space["f"])
    assert "The record has no source" in call("show", path, "--source").output


def test_show_source_prints_the_source(failed) -> None:
    assert "return (x + OFFSET)" not in call("show", failed).output
    assert "return (x + OFFSET).sum().item() / by" in call("show", failed, "--source").output


def test_show_json_is_the_manifest(failed) -> None:
    found = json.loads(call("show", failed, "--json").output)
    assert found["function"]["name"] == "divide"
    assert found["outcome"]["type"] == "ZeroDivisionError"
    assert found["verdict"]["outcome"] == "not checked"


def test_show_prints_text_that_looks_like_markup_as_it_is(tmp_path) -> None:
    def odd(x):
        raise ValueError("[bold]not[/] markup [/nonsense]")

    path = tripwire.record_call(tmp_path)(odd, {"[red]": "[/red]"})
    done = call("show", path)
    assert done.exit_code == 0
    assert "[bold]not[/] markup [/nonsense]" in done.output
    assert "[/red]" in done.output


def test_show_prints_no_control_characters_of_a_records(tmp_path) -> None:
    def odd(x):
        raise ValueError("\x1b[31mred\x1b]0;title\x07")

    done = call("show", tripwire.record_call(tmp_path)(odd, "\x1b[2J"))
    assert "\x1b" not in done.output
    assert "\x07" not in done.output


# --- replay ---


def test_replay_without_trust_is_one_line_and_two(failed) -> None:
    done = call("replay", failed)
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1
    assert "replay-untrusted" in done.output


def test_replay_shows_the_traceback_and_that_it_reproduces(failed) -> None:
    done = call("replay", failed, "--trust")
    assert done.exit_code == 0
    assert "float division by zero" in done.output
    assert done.output.splitlines()[-1] == "It reproduces."


def test_the_traceback_of_a_replay_begins_in_the_users_code(failed, refused) -> None:
    lines = call("replay", failed, "--trust").output.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[1].startswith(f'  File "{__file__}", line')
    assert not any(f"{os.sep}tripwire{os.sep}" in line for line in lines if "File" in line[:8])
    told = call("replay", refused, "--trust").output
    assert "Traceback" not in told
    assert "tripwire.errors.CannotTrace: " in told


def test_replay_of_a_call_that_returned(returned) -> None:
    done = call("replay", returned, "--trust")
    assert done.exit_code == 0
    assert done.output.splitlines()[-1] == "It reproduces."


def test_replay_of_an_interrupt_reproduces_and_any_other_ends_it(tmp_path, failed, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        tripwire.record_on_error(tmp_path / "stopped.rec")(interrupted)(torch.ones(2))
    done = call("replay", tmp_path / "stopped.rec", "--trust")
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, "It reproduces.")
    monkeypatch.setattr("tripwire.recording.replay.rerun.Rebuilt._run", interrupted)
    done = call("replay", failed, "--trust")
    assert (done.exit_code, done.output.strip()) == (1, "Aborted!")


def test_replay_prints_json(failed, returned) -> None:
    done = call("replay", failed, "--trust", "--json")
    assert done.exit_code == 0
    assert json.loads(done.output)["reproduces"] is True
    assert json.loads(done.output)["outcome"]["type"] == "ZeroDivisionError"
    assert json.loads(call("replay", returned, "--trust", "--json").output)["reproduces"] is True


def test_a_record_made_by_hand_knows_no_outcome_to_compare_with(tmp_path) -> None:
    recorder = tripwire.ExecutionRecorder(code=divide.__code__)
    recorder.add_global_var("OFFSET", OFFSET)
    for name, value in (("x", torch.ones(2)), ("by", 2)):
        recorder.add_local_var(name, value)
    recorder.get_record().dump(tmp_path / "hand.rec")
    done = call("replay", tmp_path / "hand.rec", "--trust")
    told = [line.partition(" (")[0] for line in done.output.splitlines()]
    assert (done.exit_code, told) == (0, ["recorded: not known", "replayed: returned"])
    data = json.loads(call("replay", tmp_path / "hand.rec", "--trust", "--json").output)
    assert data["reproduces"] is None
    recorder.add_local_var("by", 0)
    recorder.get_record().dump(tmp_path / "raises.rec")
    assert call("replay", tmp_path / "raises.rec", "--trust").exit_code == 1


def test_replay_with_another_back_end(refused) -> None:
    assert call("replay", refused, "--trust").exit_code == 0
    assert call("replay", refused, "--trust", "--backend", "eager").exit_code == 0
    plain = call("replay", refused, "--trust", "--backend", "none")
    assert plain.exit_code == 1
    assert plain.output.splitlines()[-1] == "It differs."


def test_replay_with_an_unknown_back_end_is_one_line_and_two(refused) -> None:
    done = call("replay", refused, "--trust", "--backend", "nonsense")
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1
    assert "unknown-backend" in done.output


def test_replay_with_pdb_opens_the_debugger_where_it_raised(failed, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr("pdb.post_mortem", seen.append)
    assert call("replay", failed, "--trust", "--pdb").exit_code == 0
    (trace,) = seen
    while trace.tb_next is not None:
        trace = trace.tb_next
    assert trace.tb_frame.f_code.co_name == "divide"
    assert trace.tb_frame.f_locals["by"] == 0


def test_the_debugger_and_json_are_not_given_together(failed) -> None:
    done = call("replay", failed, "--trust", "--pdb", "--json")
    assert (done.exit_code, len(done.output.splitlines())) == (2, 1)


def test_replay_of_what_cannot_be_built_is_one_line_and_two(monkeypatch, tmp_path) -> None:
    module = types.ModuleType("torch._gone")
    module.__file__ = torch.__file__
    module.double = types.FunctionType((lambda x: x * 2).__code__, module.__dict__, "double")
    code = module.double.__code__.replace(co_filename=torch.__file__, co_qualname="double")
    module.double.__code__ = code
    module.double.__module__, module.double.__qualname__ = "torch._gone", "double"
    monkeypatch.setitem(sys.modules, "torch._gone", module)
    path = tripwire.record_call(tmp_path)(module.double, 3)
    monkeypatch.delitem(sys.modules, "torch._gone")
    done = call("replay", path, "--trust")
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1
    assert "replay-missing-library" in done.output


# --- bad files ---


@pytest.mark.parametrize("command", [["show"], ["replay", "--trust"], ["repro"]])
@pytest.mark.parametrize("data", [b"", b"garbage" * 100, b"PK\x03\x04" + b"\0" * 50])
def test_a_file_that_is_no_record_is_one_line_and_two(command, data, tmp_path) -> None:
    (tmp_path / "x.rec").write_bytes(data)
    done = call(*command, tmp_path / "x.rec")
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1
    assert done.output.startswith(f"Error: {tmp_path / 'x.rec'}: This is not a record")
    assert ("doesn't begin as records do" in done.output) == (not data.startswith(b"PK"))


def test_a_folder_of_records_is_no_record(tmp_path) -> None:
    for error in (fail(load_record, tmp_path), fail(tripwire.replay, tmp_path, trust=True)):
        assert isinstance(error, tripwire.BadRecord)
        assert str(error) == f"{tmp_path}: It is a folder. Name a record in it. [no-record]"


def test_a_file_that_isnt_there_is_two(tmp_path) -> None:
    assert call("show", tmp_path / "x.rec").exit_code == 2


# --- repro ---


def test_a_repro_is_a_script_that_shows_the_same(failed, tmp_path) -> None:
    done = call("repro", failed)
    assert done.exit_code == 0
    assert "'def divide(x, by):\\n'" in done.output
    script = tmp_path / "repro.py"
    script.write_text(done.output)
    failed.unlink()
    ran = run_elsewhere(script, cwd=tmp_path, code=1)
    assert "ZeroDivisionError: float division by zero" in ran.stderr


def test_repro_json_is_the_script(failed) -> None:
    told = json.loads(call("repro", failed, "--json").output)
    assert told == {"script": call("repro", failed).output, "needs_tripwire": ""}


def test_a_repro_of_hostile_text_runs_nothing_of_it(tmp_path) -> None:
    text = 'x"""\nimport os\n\r\x0cos.system("touch ran")\n\x85\u2028print(1)'

    def odd(x):
        raise ValueError(text)

    odd.__qualname__ = odd.__name__ = "a\nimport os"
    written = call("repro", tripwire.record_call(tmp_path / "x.rec")(odd, text)).output
    tree = compile(written, "repro.py", "exec", dont_inherit=True)
    assert "os" not in tree.co_names
    head = written.split("import ast")[0]
    assert all(line.startswith("#") or not line for line in head.split("\n"))
    assert "\r" not in head
    assert "\x0c" not in head


def test_a_name_in_a_repro_doesnt_settle_its_encoding(tmp_path) -> None:
    def odd():
        """coding: utf-7"""
        raise ValueError("coding: utf-7 +AAo-import os")

    odd.__qualname__ = odd.__name__ = "coding: utf-7 +AAo-import os"
    written = call("repro", tripwire.record_call(tmp_path / "x.rec")(odd)).output
    tree = compile(written.encode(), "repro.py", "exec", dont_inherit=True)
    assert "os" not in tree.co_names


# --- the program ---


def test_the_program_runs(failed, tmp_path) -> None:
    done = run_elsewhere("-m", "tripwire", "show", failed, cwd=tmp_path)
    assert "divide" in done.stdout
    assert "Usage" in run_elsewhere("-m", "tripwire", "--help", cwd=tmp_path).stdout
    untrusted = run_elsewhere("-m", "tripwire", "replay", failed, cwd=tmp_path, code=2)
    assert "Traceback" not in untrusted.stderr
