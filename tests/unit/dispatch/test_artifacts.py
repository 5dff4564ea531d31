"""The store of compiled code: whole files of this user's, for this key, or none."""

from __future__ import annotations

import logging
import os
import threading

import pytest
import torch
from torch import nn

from tripwire.backends.artifacts import Artifact, Store, find_store
from tripwire.backends.keys import find_key
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


def test_a_folder_and_its_files_are_the_users_alone(store) -> None:
    store.write(KEY, KEPT)
    assert the_file(store).stat().st_mode & 0o077 == 0
    assert the_file(store).parent.stat().st_mode & 0o077 == 0


def cut(content: bytes) -> bytes:
    return content[:-1]


def flip(content: bytes) -> bytes:
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


def empty(_: bytes) -> bytes:
    return b""


def foreign(_: bytes) -> bytes:
    return b"PK\x03\x04 something else"


def newer(content: bytes) -> bytes:
    return content.replace(b"artifact 1", b"artifact 2", 1)


def headless(content: bytes) -> bytes:
    return content.replace(b"{", b"[", 1)


def renamed(content: bytes) -> bytes:
    return content.replace(KEY.encode(), b"cd" * 32, 1)


@pytest.mark.parametrize("damage", [cut, flip, empty, foreign, newer, headless, renamed])
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


def test_a_file_that_others_may_write_is_ignored(store, caplog) -> None:
    store.write(KEY, KEPT)
    the_file(store).chmod(0o666)
    assert store.read(KEY) is None
    assert "other users may write it" in caplog.text


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
    assert [path.name for path in store.folder.rglob("*") if path.is_file()] == [f"{KEY}.bin"]


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
    assert find_store() == Store(tmp_path / "tripwire")


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
