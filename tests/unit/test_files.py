"""Files: for this user alone, whole or not at all, never where a link leads."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tampering import AS_ROOT, SOMEBODY, TRICKS

from tripwire.files import (
    NotOurs,
    check_ours,
    make_folder,
    making_beside,
    open_new,
    open_to_append,
    read_ours,
    replacing,
    writing_beside,
)


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path) -> int:
    return path.stat().st_mode & 0o777


def write(path: Path, content: bytes = b"new") -> None:
    with replacing(path) as file:
        file.write(content)


# --- writing -----------------------------------------------------------------------------------


def test_files_and_folders_are_the_users_alone_whatever_the_umask(tmp_path, open_umask) -> None:
    make_folder(tmp_path / "a" / "b")
    write(tmp_path / "a" / "b" / "written")
    os.close(open_new(tmp_path / "a" / "new"))
    os.close(open_to_append(tmp_path / "a" / "appended"))
    for path in (tmp_path / "a").rglob("*"):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path
    assert mode(tmp_path / "a") == 0o700


@pytest.mark.parametrize("umask", [0o777, 0o277, 0o177, 0o077])
def test_a_umask_that_keeps_everybody_out_leaves_files_to_their_user(tmp_path, umask) -> None:
    before = os.umask(umask)
    try:
        make_folder(tmp_path / "a" / "b")
        write(tmp_path / "a" / "b" / "written")
        with making_beside(tmp_path / "draft") as draft:
            assert mode(draft) == 0o700
    finally:
        os.umask(before)
    assert mode(tmp_path / "a" / "b" / "written") == 0o600
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700


def test_a_folder_that_is_there_keeps_its_mode(tmp_path) -> None:
    (tmp_path / "there").mkdir(mode=0o755)
    make_folder(tmp_path / "there" / "inside")
    assert mode(tmp_path / "there") == 0o755
    with pytest.raises(NotADirectoryError):
        (tmp_path / "file").touch()
        make_folder(tmp_path / "file")


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path) -> None:
    (tmp_path / "precious").write_text("mine")
    for place, target in (("one", "precious"), ("two", "nowhere")):
        (tmp_path / place).symlink_to(tmp_path / target)
        write(tmp_path / place)
        assert not (tmp_path / place).is_symlink()
        assert (tmp_path / place).read_bytes() == b"new"
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_a_second_name_keeps_the_old_content(tmp_path) -> None:
    (tmp_path / "precious").write_text("mine")
    os.link(tmp_path / "precious", tmp_path / "place")
    write(tmp_path / "place")
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_left_alone_and_nobody_waits(tmp_path, make) -> None:
    make(tmp_path / "place")
    with pytest.raises(OSError, match="no file"):
        write(tmp_path / "place")
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


def test_links_arent_followed_by_what_is_made_or_appended_to(tmp_path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    for make in (open_new, open_to_append):
        with pytest.raises(OSError):
            make(tmp_path / "link")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_block_that_raises_leaves_the_old_file_and_no_draft(tmp_path) -> None:
    (tmp_path / "place").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        with replacing(tmp_path / "place") as file:
            file.write(b"half")
            raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["place"]
    assert (tmp_path / "place").read_text() == "old"


TO_STREAM = """
import sys
from tripwire.files import replacing
with replacing(sys.argv[1]) as file:
    file.write(b"told ")
print("after")
"""


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_a_stream_of_the_process_is_written_to_and_stays_what_it_is(name, tmp_path) -> None:
    command = [sys.executable, "-c", TO_STREAM, name]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=env, stdout=subprocess.PIPE).stdout == b"told after\n"
    with (tmp_path / "file").open("wb") as file:
        subprocess.run(command, env=env, stdout=file, check=True)
    assert (tmp_path / "file").read_bytes() == b"told after\n"
    assert Path("/dev/stdout").is_symlink()


def test_a_device_is_written_to_and_stays_what_it_is() -> None:
    write(Path("/dev/null"))
    assert Path("/dev/null").is_char_device()


def test_drafts_of_killed_processes_are_swept_after_a_day_unless_held(tmp_path) -> None:
    yesterday = time.time() - 2 * 24 * 3600
    names = {
        "abandoned": ".tripwire-0123456789abcdef.draft",
        "young": ".tripwire-1123456789abcdef.draft",
        "not ours": ".tripwire-notes.draft",
    }
    for kind, name in names.items():
        (tmp_path / name).write_text("x")
        if kind != "young":
            os.utime(tmp_path / name, (yesterday, yesterday))
    with writing_beside(tmp_path / "slow") as draft:
        held = tmp_path / draft.name
        os.utime(held, (yesterday, yesterday))
        write(tmp_path / "place")
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {names["young"], names["not ours"], held.name, "place"}


def test_folders_of_killed_processes_are_swept_like_files(tmp_path) -> None:
    def begin(number: int) -> Path:
        draft = tmp_path / f".tripwire-{number}123456789abcdef.draft"
        draft.mkdir()
        (draft / "key").write_text("half")
        return draft

    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    abandoned, young = begin(0), begin(1)
    link = tmp_path / ".tripwire-2123456789abcdef.draft"
    link.symlink_to(precious)
    (young / "link").symlink_to(precious)
    (abandoned / "link").symlink_to(precious)
    os.utime(abandoned, (1, 1))
    with making_beside(tmp_path / "slow") as held:
        assert mode(held) == 0o700
        os.utime(held, (1, 1))
        write(tmp_path / "place")
        assert not abandoned.exists()
        assert young.exists()
        assert held.exists()
        assert link.exists()
    assert not held.exists()
    assert (precious / "file").exists()


@pytest.mark.parametrize("others", [0o002, 0o020])
def test_a_folder_that_others_may_have_named_like_a_draft_is_left_alone(tmp_path, others) -> None:
    """Who may write to a folder can give another name to the folders in it, and empties none."""
    shared = tmp_path / "shared"
    moved = shared / ".tripwire-0123456789abcdef.draft"
    moved.mkdir(parents=True)
    (moved / "precious").write_text("mine")
    os.utime(moved, (1, 1))
    shared.chmod(0o750 | others)
    write(shared / "report.html")
    assert (moved / "precious").read_text() == "mine"
    shared.chmod(0o700)
    write(shared / "report.html")
    assert not moved.exists()


@AS_ROOT
def test_a_draft_of_another_user_is_left_to_them(tmp_path) -> None:
    theirs = tmp_path / ".tripwire-0123456789abcdef.draft"
    theirs.write_text("x")
    os.utime(theirs, (1, 1))
    os.chown(theirs, SOMEBODY, -1)
    write(tmp_path / "place")
    assert theirs.exists()


# --- folders that are swapped for links -----------------------------------------------------------


class Swap:
    """Somebody who may write around a folder, and puts a link to the user's own in its place."""

    def __init__(self, base: Path) -> None:
        self.folder, self.moved, self.precious = base / "out", base / "moved", base / "precious"
        for folder in (self.folder, self.precious):
            (folder / "sub").mkdir(parents=True)
            (folder / "report.html").write_text("mine")
            (folder / ".tripwire-0123456789abcdef.draft").write_text("mine")
            os.utime(folder / ".tripwire-0123456789abcdef.draft", (1, 1))

    def __call__(self) -> None:
        if not self.moved.exists():
            self.folder.rename(self.moved)
            self.folder.symlink_to(self.precious)
            if os.getuid() == 0:
                os.lchown(self.folder, SOMEBODY, -1)

    def check(self) -> None:
        found = {path.relative_to(self.precious) for path in self.precious.rglob("*")}
        names = ("sub", "report.html", ".tripwire-0123456789abcdef.draft")
        assert found == set(map(Path, names))
        assert (self.precious / "report.html").read_text() == "mine"


def append(path: Path) -> None:
    with os.fdopen(open_to_append(path), "wb") as file:
        file.write(b"new")


def make_new(path: Path) -> None:
    os.close(open_new(path))


def make_below(path: Path) -> None:
    make_folder(path.with_name("a") / "b")


def link_free(path: Path) -> None:
    with writing_beside(path) as draft:
        draft.link(path.name)


CALLS = ("open", "mkdir", "replace", "link", "unlink", "stat", "lstat", "listdir", "readlink")


@AS_ROOT
@pytest.mark.parametrize("place", ["report.html", "new.html", "sub/new.html"])
@pytest.mark.parametrize("do", [write, append, make_new, make_below, link_free])
def test_a_folder_that_others_swap_for_a_link_leads_nowhere(tmp_path, monkeypatch, do, place):
    """Whenever that happens: before each call to the system in turn."""
    number, calls = 0, 1
    while number < calls:
        base = tmp_path / str(number)
        base.mkdir()
        swap, calls = Swap(base), 0

        def watch(name: str, swap=swap, number=number) -> None:
            plain = getattr(os, name)

            def call(*args, **kwargs):
                nonlocal calls
                if calls == number:
                    calls += 1  # what the swap itself does is no call of ours
                    swap()
                else:
                    calls += 1
                return plain(*args, **kwargs)

            patch.setattr(os, name, call)

        with monkeypatch.context() as patch:
            for name in CALLS:
                watch(name)
            with suppress(OSError):
                do(swap.folder / place)
        swap.check()
        number += 1
    assert number > 5


def test_what_is_written_stays_in_the_folder_that_was_there_at_first(tmp_path) -> None:
    swap = Swap(tmp_path)
    with replacing(swap.folder / "report.html") as file:
        swap()
        file.write(b"new")
    swap.check()
    assert (swap.moved / "report.html").read_bytes() == b"new"


@AS_ROOT
@pytest.mark.parametrize("do", [write, append, make_new, make_below, link_free])
def test_a_link_of_somebody_elses_on_the_way_is_refused(tmp_path, do) -> None:
    swap = Swap(tmp_path)
    swap()
    with pytest.raises(NotOurs, match="belongs to another user"):
        do(swap.folder / "new.html")
    swap.check()


# --- trusting ----------------------------------------------------------------------------------


def build_place(base: Path) -> Path:
    make_folder(base / "up" / "store")
    write(base / "up" / "store" / "file", b"ours")
    return base / "up" / "store" / "file"


def read(path: Path) -> bytes:
    check_ours(path.parent)
    return read_ours(path)


def test_what_we_wrote_below_a_sticky_folder_is_ours(tmp_path) -> None:
    path = build_place(tmp_path)
    assert read(path) == b"ours"
    tmp_path.chmod(0o1777)
    assert read(path) == b"ours"


def test_a_link_of_ours_on_the_way_is_followed(tmp_path) -> None:
    path = build_place(tmp_path / "real")
    (tmp_path / "home").symlink_to("real/up/../up")
    assert read(tmp_path / "home" / "store" / "file") == path.read_bytes()


def writable_parent(path: Path) -> None:
    path.parent.parent.chmod(0o757)


def sticky_folder(path: Path) -> None:
    path.parent.chmod(0o1777)


def foreign_link_on_the_way(path: Path) -> None:
    path.parent.rename(path.parent.with_name("real"))
    path.parent.symlink_to("real")
    os.lchown(path.parent, SOMEBODY, -1)


def way_in_circles(path: Path) -> None:
    path.parent.rename(path.parent.with_name("real"))
    path.parent.symlink_to("store")


OTHERS = [
    *TRICKS,
    *(writable_parent, sticky_folder, way_in_circles),
    pytest.param(foreign_link_on_the_way, marks=AS_ROOT),
]


@pytest.mark.parametrize("trick", OTHERS)
def test_what_others_may_have_put_there_isnt_read(tmp_path, trick) -> None:
    path = build_place(tmp_path)
    trick(path)
    with pytest.raises(NotOurs):
        read(path)
