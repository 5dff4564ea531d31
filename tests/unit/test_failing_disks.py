"""Disks that are full, read-only or gone: what plain Python runs runs, and a line says what isn't.

A file that may have no more bytes than a limit fails as a full disk does, at the first byte or
midway.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support import run_python, run_with_torch

import tripwire
from tripwire.backends.artifacts import Artifact, Store
from tripwire.cli import main
from tripwire.files import check_ours, make_folder, replacing
from tripwire.telemetry import LogReader, log, pytorch
from tripwire.telemetry.schema import Instant

resource = pytest.importorskip("resource")

ROOM = (0, 1, 40, 700)  # bytes of a file, in which nothing below fits
KEY = "ab" * 32
KEPT = Artifact(b"code" * 1000, {})


@contextmanager
def full_disk(room: int = 0) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("room", ROOM)
def test_a_file_that_cant_be_written_whole_leaves_the_old_one_and_no_draft(tmp_path, room) -> None:
    (tmp_path / "place").write_text("old")
    with full_disk(room), pytest.raises(OSError), replacing(tmp_path / "place") as file:
        file.write(b"new" * 1000)
    assert files_in(tmp_path) == ["place"]
    assert (tmp_path / "place").read_text() == "old"


@pytest.mark.parametrize("room", ROOM)
def test_a_store_without_room_keeps_nothing_says_so_once_and_works_again(
    tmp_path, room, caplog
) -> None:
    store = Store(tmp_path / "store")
    with full_disk(room):
        for number in range(3):
            store.write(f"{number:02}" * 32, KEPT)
            assert store.read(f"{number:02}" * 32) is None
    assert caplog.text.count("can't be kept") == len(caplog.records) == 1
    store.write(KEY, KEPT)
    assert store.read(KEY) == KEPT
    assert files_in(store.folder) == ["CACHEDIR.TAG", f"{KEY}.bin"]


@pytest.mark.parametrize("room", ROOM)
def test_a_log_without_room_ends_says_so_once_and_changes_no_call(tmp_path, room, caplog) -> None:
    compiled = tripwire.compile(lambda x: x * 2, backend="eager")
    with full_disk(room), log.logging_to(tmp_path):
        for _ in range(3):
            assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert caplog.text.count("nothing more is logged") == len(caplog.records) == 1
    assert len(list(LogReader(tmp_path))) < 5  # what was whole is read


def fail(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("the user's own")


@pytest.mark.parametrize("room", ROOM)
def test_a_call_that_fails_without_room_for_its_record_fails_as_it_is(
    tmp_path, room, caplog
) -> None:
    for failing in (
        tripwire.record_on_error(tmp_path)(fail),
        tripwire.compile(fail, backend="eager", record_on_error=tmp_path),
    ):
        caplog.clear()
        with full_disk(room), pytest.raises(ValueError, match="the user's own"):
            failing(torch.ones(2))
        (said,) = [said for said in caplog.records if said.levelno >= logging.WARNING]
        assert "could not be recorded: [Errno" in said.getMessage()
        assert said.exc_info is None
    with full_disk(room), tripwire.record_block(tmp_path) as block:
        pass
    assert block.path is None
    assert "Traceback" not in caplog.text
    assert files_in(tmp_path) == []


def test_a_record_without_room_for_its_verdict_is_there_without_it(
    tmp_path, monkeypatch, caplog
) -> None:
    """A verdict is stamped by writing the file anew."""

    def fail_to_stamp(path, verdict):
        with full_disk():
            stamp(path, verdict)

    from tripwire.recording.capture import outcomes

    stamp = outcomes.stamp
    monkeypatch.setattr(outcomes, "stamp", fail_to_stamp)
    monkeypatch.setattr(outcomes, "_replay_elsewhere", lambda path: outcomes.Replayed(None))
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "1")
    path = tripwire.record_call(tmp_path / "call.rec")(torch.relu, torch.ones(2))
    assert tripwire.load_record(path).manifest.verdict.outcome == "not checked"
    assert f"The record {path} has no verdict" in caplog.text
    assert files_in(tmp_path) == ["call.rec"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a disk that is full")
def test_a_log_file_without_room_is_dropped_and_leaves_its_block_in_peace(caplog) -> None:
    logger = logging.getLogger("tripwire.trace")
    with pytorch.setup_log_file("/dev/full"):
        for _ in range(3):
            logger.warning("told")
    assert caplog.text.count("nothing more is logged into /dev/full") == 1
    assert caplog.text.count("told") == 3


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("command", [["report"], ["trace"], ["trace", "--format", "torch"]])
def test_a_command_without_room_is_a_line_and_leaves_what_was_there(
    tmp_path, command, room
) -> None:
    with log.logging_to(tmp_path) as written:
        written.write(Instant(time_ns=1, name="x"))
    for name in ("report.html", "trace.json"):
        (tmp_path / name).write_text("old")
    before = files_in(tmp_path)
    with full_disk(min(room, 100)):
        done = CliRunner().invoke(main, [*command, str(tmp_path)])
    assert done.exit_code == 2
    assert done.output in ("Error: File too large.\n", "Error: No space left on device.\n")
    assert files_in(tmp_path) == before
    assert (tmp_path / "report.html").read_text() == "old"


def test_a_folder_can_be_trusted_though_the_one_that_we_work_in_is_gone(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    check_ours(tmp_path)
    store = Store(tmp_path / "store")
    store.write(KEY, KEPT)
    assert store.read(KEY) == KEPT


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="Linux has such a folder")
def test_where_no_folder_can_be_made_the_error_is_the_systems() -> None:
    with pytest.raises(OSError) as raised:
        make_folder("/proc/self/.config/tripwire")
    assert raised.value.filename.startswith("/proc/")


def test_torch_is_told_the_whole_path_of_a_store_with_a_relative_one(tmp_path) -> None:
    told = run_with_torch(
        f"import os; os.chdir({str(tmp_path)!r})\n{FOLDERS}\nprint(*settle())",
        env={"TRIPWIRE_CACHE_DIR": "rel"},
    )
    assert told.split() == ["True", str(tmp_path / "rel" / "torch")]


def test_a_store_of_which_torch_made_its_folders_anew_is_a_store_again(tmp_path) -> None:
    store = Store(tmp_path / "store")
    (store.folder / "torch" / "ab").mkdir(parents=True)
    store.write(KEY, KEPT)
    assert store.read(KEY) == KEPT


def test_a_kernel_folder_that_torch_made_anew_is_closed_if_nobody_wrote_in_it(tmp_path) -> None:
    store = Store(tmp_path / "store")
    folder = store.make_kernel_folder()
    shutil.rmtree(folder)
    (folder / "ab").mkdir(parents=True)
    for path in (folder, folder / "ab"):
        path.chmod(0o755)
    store.make_kernel_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    (folder / "ab").chmod(0o777)
    with pytest.raises(tripwire.TripwireError, match="other users may write"):
        store.make_kernel_folder()


# --- Inductor ----------------------------------------------------------------------------------

FOLDERS = """
import logging, os, shutil, tempfile
logging.basicConfig(level=logging.WARNING)
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
from tripwire.backends.inductor import _settle_kernels, find_store
def settle():
    store = _settle_kernels(find_store())
    return store is not None, os.environ["TORCHINDUCTOR_CACHE_DIR"]
"""


def test_a_store_that_is_read_only_serves_and_torch_builds_elsewhere(tmp_path) -> None:
    """By what the system says: root may write to any folder."""
    env = {"TRIPWIRE_CACHE_DIR": str(tmp_path / "own"), "TMPDIR": str(tmp_path)}
    told = run_with_torch(
        f"{FOLDERS}\nprint(*settle())\nasked = os.access\n"
        "os.access = lambda path, mode: 'own' not in str(path) and asked(path, mode)\n"
        "for _ in range(2): print(*settle())",
        env=env,
    ).split()
    assert told[:2] == ["True", str(tmp_path / "own" / "torch")]
    assert told[2:4] == told[4:]
    assert told[2] == "True"
    assert Path(told[3]).parent == tmp_path


def test_a_temporary_folder_that_is_gone_or_anothers_isnt_used_again(tmp_path) -> None:
    tmp_path.chmod(0o1777)
    told = run_with_torch(
        f"{FOLDERS}\nfrom tripwire.backends.inductor import default_cache_dir\n"
        "os.makedirs(default_cache_dir(), exist_ok=True); os.chmod(default_cache_dir(), 0o777)\n"
        "first, second = settle()[1], settle()[1]\n"
        "shutil.rmtree(first); third = settle()[1]\n"
        "os.chmod(third, 0o777); fourth = settle()[1]\n"
        "print(first == second, len({first, third, fourth}), os.stat(fourth).st_mode & 0o777)",
        env={"TRIPWIRE_CACHE_DIR": "", "TMPDIR": str(tmp_path)},
    )
    assert told.split() == ["True", "3", str(0o700)]
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 1 and left[0].startswith("torchinductor_")


TRAIN = """
import logging, os, resource, shutil, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
import torch, tripwire
import tripwire.backends.inductor

tripwire.backends.inductor.CAN_PACK = False  # what isn't kept has its backward compiled late
home = os.environ["TRIPWIRE_CACHE_DIR"]

def plain(x, w):
    return (x * w).sin().sum()

def full():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

def gone():
    shutil.rmtree(home)

def taken():
    shutil.rmtree(home)
    open(home, "w").close()

for harm in (gone, taken, full):
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    compiled = tripwire.compile(plain, backend="inductor")
    compiled(x, w)  # as plain Python, observed
    loss = compiled(x, w)
    harm()
    loss.backward()
    given, w.grad = w.grad, None
    plain(x, w).backward()
    torch.testing.assert_close(given, w.grad)
    if harm is not full:
        print(harm.__name__, os.path.exists(home + "/CACHEDIR.TAG"))
    if harm is taken:
        os.unlink(home)
    torch._functorch._aot_autograd.autograd_cache.AOTAutogradCache.clear()
    print("ran", harm.__name__)

strict = tripwire.compile(plain, backend="inductor", on_backend_error="raise")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
strict(torch.ones(4), w[:1])
loss = strict(torch.ones(4), w[:1])
full()
try:
    loss.backward()
except Exception as error:
    print("raised", type(error).__name__)
"""


def test_a_backward_runs_where_it_cant_be_compiled_any_more(tmp_path) -> None:
    """Code that isn't kept has it compiled when it is first run: by then the disk may be full."""
    env = {
        "TRIPWIRE_CACHE_DIR": str(tmp_path / "own"),
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TMPDIR": str(tmp_path),
    }
    told = run_python(TRAIN, env=env)  # its output is no file: files may not grow in it
    for harm in ("gone", "taken", "full"):
        assert f"ran {harm}" in told
    assert "gone True" in told  # the store was made anew, before torch made a part of it
    assert told.count("The graph runs uncompiled.") == 1
    assert told.strip().endswith("raised InductorError")
