"""The store of compiled code: whole files of this user's, for this key, or none."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tampering import AS_ROOT, SOMEBODY, TRICKS
from torch import nn

from tripwire.backends import artifacts
from tripwire.backends.artifacts import Artifact, Store, find_secret, find_store
from tripwire.backends.inductor import find_key
from tripwire.errors import BadStore
from tripwire.tracing import Tracer

KEY = "ab" * 32
KEPT = Artifact(b"\x00code\n\xff", {"best_isa": True})


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def the_file(store):
    (path,) = store.folder.glob("*/*.bin")
    return path


def test_what_was_written_is_read(store) -> None:
    assert store.read(KEY) is None
    store.write(KEY, KEPT)
    assert store.read(KEY) == KEPT
    assert store.read("cd" * 32) is None


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_a_folder_and_its_files_are_the_users_alone(tmp_path, umask) -> None:
    before = os.umask(umask)
    try:
        store = Store(tmp_path / "home" / "store")
        store.write(KEY, KEPT)
        store.make_kernel_folder()
    finally:
        os.umask(before)
    for path in (tmp_path / "home", *(tmp_path / "home").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def cut(content: bytes) -> bytes:
    return content[:-1]


def flip(content: bytes) -> bytes:
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


def empty(_: bytes) -> bytes:
    return b""


def foreign(_: bytes) -> bytes:
    return b"PK\x03\x04 something else"


def newer(content: bytes) -> bytes:
    return content.replace(b"artifact 2", b"artifact 3", 1)


def headless(content: bytes) -> bytes:
    return content.replace(b"{", b"[", 1)


def renamed(content: bytes) -> bytes:
    return content.replace(KEY.encode(), b"cd" * 32, 1)


def resigned(content: bytes) -> bytes:
    return content.replace(content.split(b"\n")[1], b"0" * 64, 1)


def unended(content: bytes) -> bytes:
    digest = content.split(b"\n")[1]
    return content.replace(digest + b"\n", digest + b" ", 1)


def unsigned(content: bytes) -> bytes:
    return content.replace(content.split(b"\n")[1] + b"\n", b"", 1)


def with_another_key(content: bytes) -> bytes:
    _, _, header, payload = content.split(b"\n", 3)
    digest = artifacts._sign(b"k" * 32, header + b"\n", payload)
    return b"\n".join((b"tripwire artifact 2", digest, header, payload))


def nested(content: bytes) -> bytes:
    head = b"\n".join(content.split(b"\n")[:2])
    return head + b"\n" + b"[" * 1_000_000 + b"\n"


DAMAGES = [
    *(cut, flip, empty, foreign, newer, headless, renamed, resigned, unended, unsigned),
    *(with_another_key, nested),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_file_is_ignored_with_a_warning(store, damage, caplog) -> None:
    store.write(KEY, KEPT)
    path = the_file(store)
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING, "tripwire.cache"):
        assert store.read(KEY) is None
    assert "is ignored" in caplog.text
    assert str(path) in caplog.text
    store.write(KEY, KEPT)
    assert store.read(KEY) == KEPT


def test_an_artifact_of_another_key_isnt_this_ones(store, caplog) -> None:
    other = "ac" + KEY[2:]
    store.write(KEY, KEPT)
    store.write(other, KEPT)
    shutil.copy(store._path(KEY), store._path(other))
    assert store.read(other) is None
    assert "something else" in caplog.text


# --- whose it is -------------------------------------------------------------------------------


def link_to_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.symlink_to("elsewhere")


def writable_root(path: Path) -> None:
    path.parent.parent.chmod(0o777)


def writable_parent(path: Path) -> None:
    path.parent.parent.parent.chmod(0o775)


def tag_elsewhere(path: Path) -> None:
    tag = path.parent.parent / "CACHEDIR.TAG"
    tag.rename(tag.with_name("tag"))
    tag.symlink_to("tag")


def root_given_away(path: Path) -> None:
    os.chown(path.parent.parent.parent, SOMEBODY, -1)


OTHERS = [
    *TRICKS,
    *(link_to_folder, writable_root, writable_parent, tag_elsewhere),
    pytest.param(root_given_away, marks=AS_ROOT),
]


@pytest.mark.parametrize("trick", OTHERS)
def test_what_others_may_have_put_there_is_told_once_and_not_read(store, trick, caplog) -> None:
    store.write(KEY, KEPT)
    trick(store._path(KEY))
    for _ in range(3):
        assert store.read(KEY) is None
    assert caplog.text.count("is ignored") == 1
    assert "[store-not-ours]" in caplog.text


def test_a_store_that_others_may_write_to_keeps_nothing(tmp_path, caplog) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    Store(shared).write(KEY, KEPT)
    assert list(shared.iterdir()) == []
    assert "name a folder of your own" in caplog.text
    assert "chmod" not in caplog.text  # of what is meant for all
    mine = tmp_path / "mine"
    mine.mkdir()
    mine.chmod(0o777)
    Store(mine).write(KEY, KEPT)
    assert "chmod go-w" in caplog.text
    Store(shared / "x").write(KEY, KEPT)  # as /tmp/x would be
    assert Store(shared / "x").read(KEY) == KEPT


# --- the key -----------------------------------------------------------------------------------


@pytest.fixture
def key_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "tripwire" / "store" / "key"


def test_the_key_is_made_once_for_the_user_alone(key_file) -> None:
    before = os.umask(0)
    try:
        secret = find_secret()
    finally:
        os.umask(before)
    assert find_secret() == secret == key_file.read_bytes()
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in key_file.parent.parent.iterdir()] == ["store"]


def test_many_processes_that_come_at_once_have_one_key(key_file) -> None:
    code = "from tripwire.backends.artifacts import find_secret; print(find_secret().hex())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
        for _ in range(3)
    ]
    assert {run.communicate()[0].strip() for run in runs} == {key_file.read_bytes().hex().encode()}


def test_many_threads_that_come_at_once_have_one_key(key_file) -> None:
    barrier, found = threading.Barrier(8), []

    def work() -> None:
        barrier.wait()
        found.append(find_secret())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {key_file.read_bytes()}
    assert len(found) == 8


def test_what_a_killed_process_left_of_a_key_goes_after_a_day(key_file) -> None:
    code = (
        "import os; from tripwire.backends import artifacts\n"
        "artifacts.files.open_new = lambda path: os._exit(1)\n"
        "artifacts.find_secret()"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 1
    home = key_file.parent.parent
    (draft,) = home.iterdir()
    find_secret()
    assert draft.exists()
    os.utime(draft, (1, 1))
    find_secret()
    assert [path.name for path in home.iterdir()] == ["store"]


def test_with_another_key_everything_is_made_anew(store, key_file, caplog) -> None:
    store.write(KEY, KEPT)
    shutil.rmtree(key_file.parent)
    assert store.read(KEY) is None
    assert "[artifact-unusable]" in caplog.text
    store.write(KEY, KEPT)
    assert store.read(KEY) == KEPT


def short_key(key_file: Path) -> None:
    key_file.write_bytes(b"")


def writable_key(key_file: Path) -> None:
    key_file.chmod(0o660)


def readable_key(key_file: Path) -> None:
    key_file.chmod(0o640)


def second_name_of_key(key_file: Path) -> None:
    os.link(key_file, key_file.parent.parent / "elsewhere")


def link_to_key(key_file: Path) -> None:
    key_file.rename(key_file.with_name("elsewhere"))
    key_file.symlink_to("elsewhere")


def pipe_for_key(key_file: Path) -> None:
    key_file.unlink()
    os.mkfifo(key_file)


def writable_home(key_file: Path) -> None:
    key_file.parent.parent.chmod(0o777)


@pytest.mark.parametrize(
    "trick",
    [
        short_key,
        writable_key,
        readable_key,
        second_name_of_key,
        link_to_key,
        pipe_for_key,
        writable_home,
    ],
)
def test_a_key_that_others_may_know_or_set_isnt_used(store, key_file, trick, caplog) -> None:
    store.write(KEY, KEPT)
    trick(key_file)
    assert store.read(KEY) is None
    store.write(KEY, KEPT)
    assert "[store-key]" in caplog.text


# --- a folder that is no store -----------------------------------------------------------------


def test_a_folder_of_the_users_is_refused_with_a_word_and_loses_nothing(
    tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("tripwire.backends.artifacts._LARGEST_FOLDER", 10)
    data = tmp_path / "data"
    for name in ("en/pytorch_model.bin", f"ab/{KEY}.bin", "torch/weights.bin"):
        (data / name).parent.mkdir(parents=True)
        (data / name).write_bytes(bytes(1_000))
    before = sorted(data.rglob("*"))
    store = Store(data)
    store.write(KEY, KEPT)
    assert store.read(KEY) is None
    assert sorted(data.rglob("*")) == before
    assert "[store-taken]" in caplog.text
    assert "TRIPWIRE_CACHE_DIR" in store.find_trouble()


def test_pruning_touches_only_what_has_our_name_and_our_magic(store, monkeypatch) -> None:
    store.write(KEY, KEPT)
    theirs = [
        store.folder / "en" / "pytorch_model.bin",
        store.folder / "ab" / "pytorch_model.bin",
        store.folder / "ab" / ("ab" * 31 + "cd.bin"),  # our name, not our magic
        store.folder / "ab" / ("ab" * 31 + "ef.bin.bak"),
        store.folder / "notes.bin",
    ]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(5_000))
        os.utime(path, (1, 1))
    precious = store.folder.parent / "precious"
    precious.write_bytes(b"tripwire artifact 2\n" + bytes(5_000))
    (store.folder / "ab" / ("ab" * 31 + "00.bin")).symlink_to(precious)
    monkeypatch.setattr("tripwire.backends.artifacts._LARGEST_FOLDER", 10)
    store.write("cd" * 32, KEPT)
    assert all(path.exists() for path in (*theirs, precious))
    assert store.read(KEY) is None
    assert store.read("cd" * 32) is None


def test_old_libraries_go_when_there_are_too_many(store, monkeypatch) -> None:
    monkeypatch.setattr("tripwire.backends.artifacts._LARGEST_FOLDER", 2_500)
    kernels = store.make_kernel_folder()
    long_ago = time.time() - 7 * 24 * 3600
    for age, name in enumerate(("a.so", "b.so", "c.so")):
        (kernels / "xx").mkdir(exist_ok=True)
        (kernels / "xx" / name).write_bytes(bytes(1_000))
        os.utime(kernels / "xx" / name, (long_ago + age, long_ago + age))
    (kernels / "young.so").write_bytes(bytes(1_000))
    store.write(KEY, Artifact(b"", {}))
    assert sorted(path.name for path in kernels.rglob("*.so")) == ["c.so", "young.so"]


def test_pruning_never_leaves_the_store_through_a_link(store, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tripwire.backends.artifacts._LARGEST_FOLDER", 10)
    store.write(KEY, KEPT)
    data = tmp_path / "data"
    data.mkdir()
    (data / "weights.bin").write_bytes(bytes(5_000))
    os.utime(data / "weights.bin", (1, 1))
    (store.folder / "torch").symlink_to(data)
    store.write(KEY, KEPT)
    assert (data / "weights.bin").exists()


@pytest.mark.parametrize("target", ["link", "nowhere"])
def test_a_link_to_nothing_is_trouble(tmp_path, target) -> None:
    (tmp_path / "link").symlink_to(target)
    assert Store(tmp_path / "link").find_trouble()


def test_a_name_that_is_too_long_costs_a_warning(tmp_path, caplog) -> None:
    store = Store(tmp_path / ("x" * 300))
    store.find_trouble()
    store.write(KEY, KEPT)
    assert store.read(KEY) is None
    assert "can't be kept" in caplog.text


def test_a_draft_of_a_killed_process_goes_after_a_day(store) -> None:
    store.write(KEY, KEPT)
    draft = store._path(KEY).with_name(".tripwire-0123456789abcdef.draft")
    draft.write_bytes(b"half")
    store.write(KEY, KEPT)
    assert draft.exists()
    os.utime(draft, (1, 1))
    store.write(KEY, KEPT)
    assert not draft.exists()


def test_a_folder_that_cant_be_written_costs_a_warning(tmp_path, caplog) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    Store(blocked).write(KEY, KEPT)
    assert "can't be kept" in caplog.text
    assert blocked.read_text() == "no folder"


def test_many_threads_may_write_and_read(store) -> None:
    found = []

    def work(number: int) -> None:
        for _ in range(30):
            store.write(KEY, Artifact(bytes([number]) * 5_000, {}))
            found.append(store.read(KEY))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 120
    assert all(len(set(artifact.payload)) == 1 for artifact in found)
    names = {path.name for path in store.folder.rglob("*") if path.is_file()}
    assert names == {f"{KEY}.bin", "CACHEDIR.TAG"}


def test_the_least_recently_used_go_when_the_folder_is_full(store, monkeypatch) -> None:
    monkeypatch.setattr("tripwire.backends.artifacts._LARGEST_FOLDER", 25_000)
    keys = [f"{number:02x}" * 32 for number in range(3)]
    for age, key in enumerate(keys[:2]):
        store.write(key, Artifact(bytes(10_000), {}))
        os.utime(store._path(key), (age, age))
    assert store.read(keys[0]) is not None  # which makes it the newest
    store.write(keys[2], Artifact(bytes(10_000), {}))
    assert [store.read(key) is not None for key in keys] == [True, False, True]


def test_the_folder_is_named_by_the_environment(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRIPWIRE_CACHE_DIR", str(tmp_path))
    assert find_store() == Store(tmp_path)
    monkeypatch.setenv("TRIPWIRE_CACHE_DIR", "")
    assert find_store() is None
    monkeypatch.delenv("TRIPWIRE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_store() == Store(tmp_path / "tripwire" / "store")


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME"])
def test_a_path_that_begins_nowhere_names_no_store(variable, monkeypatch, tmp_path, caplog) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TRIPWIRE_CACHE_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(variable, "somewhere")
    found = find_store()
    if variable == "HOME":
        assert found is None
        assert "there is no home" in caplog.text
        with pytest.raises(BadStore, match="there is no home"):
            find_secret()
    else:
        assert found == Store(tmp_path / "home" / ".cache" / "tripwire" / "store")
    assert not list(tmp_path.iterdir())


# --- keys --------------------------------------------------------------------------------------


def key_of(fn, *args, **options):
    trace = Tracer().trace(fn, *args)
    return find_key(trace.graph_module, trace.fetch(trace.bind(*args)), options)


def double(x):
    return x * 2


def triple(x):
    return x * 3


def test_the_same_graph_on_the_same_form_has_the_same_key() -> None:
    assert key_of(double, torch.zeros(3)) == key_of(double, torch.ones(3))


@pytest.mark.parametrize(
    ("fn", "x", "options"),
    [
        (triple, torch.zeros(3), {}),
        (double, torch.zeros(4), {}),
        (double, torch.zeros(3, dtype=torch.float64), {}),
        (double, torch.zeros(3, requires_grad=True), {}),
        (double, torch.zeros(6)[::2], {}),
        (double, torch.zeros(3), {"max_autotune": True}),
    ],
)
def test_anything_that_differs_gives_another_key(fn, x, options) -> None:
    other = key_of(fn, x, **options)
    assert other is not None
    assert other != key_of(double, torch.zeros(3))


def test_torchs_state_is_part_of_a_key() -> None:
    before = key_of(double, torch.zeros(3))
    with torch.no_grad():
        assert key_of(double, torch.zeros(3)) != before
    torch.set_float32_matmul_precision("high")
    try:
        assert key_of(double, torch.zeros(3)) != before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_shared_memory_is_part_of_a_key() -> None:
    def add(a, b):
        return a + b

    base = torch.zeros(6)
    assert key_of(add, base[:3], base[3:]) != key_of(add, base[:3], torch.zeros(6)[3:])


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_what_the_text_of_a_graph_cant_tell_has_no_key() -> None:
    assert key_of(Double.apply, torch.zeros(3, requires_grad=True)) is None
    assert key_of(double, torch.zeros(3), post_grad_custom_pre_pass=print) is None


def test_a_module_that_is_used_twice_has_one_key() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    x = torch.zeros(2, 3)
    assert key_of(first, x) == key_of(second, x)
