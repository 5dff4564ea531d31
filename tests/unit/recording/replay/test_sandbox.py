"""`tripwire replay --trust --sandbox`: no network, and no writes but to a temporary folder."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tripwire
from tripwire.cli import main
from tripwire.errors import CannotReplay
from tripwire.sandbox import find_command


def has_sandbox() -> str:
    """Why there is none; empty where there is."""
    try:
        find_command()
    except CannotReplay as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(has_sandbox()), reason=has_sandbox() or "there is one")


def write(tmp_path: Path, target: Path, port: int) -> Path:
    place = str(target)

    def harms(x):
        import socket
        import tempfile

        told = []
        try:
            with open(place, "w") as file:
                file.write("was here")
        except OSError:
            told.append("no write")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except OSError:
            told.append("no network")
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
            told.append("a temporary file")
        raise ValueError(", ".join(told))

    with pytest.raises(ValueError, match="^a temporary file"):
        tripwire.record_on_error(tmp_path / "records")(harms)(torch.ones(1))
    (path,) = (tmp_path / "records").glob("*.rec")
    return path


@needs_sandbox
def test_a_sandboxed_replay_has_no_network_and_writes_nothing_that_stays(tmp_path):
    target = tmp_path / "victim"
    with socket.create_server(("127.0.0.1", 0)) as server:
        path = write(tmp_path, target, server.getsockname()[1])
        target.unlink()
        command = [sys.executable, "-m", "tripwire", "replay", str(path), "--trust", "--sandbox"]
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert "no write, no network, a temporary file" in told
    assert not target.exists()


def test_without_bubblewrap_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    path = tmp_path / "any.rec"
    path.write_bytes(b"")
    ended = CliRunner().invoke(main, ["replay", str(path), "--trust", "--sandbox"])
    assert ended.exit_code == 2
    assert "install bubblewrap" in ended.output


def test_a_sandbox_is_no_trust(tmp_path):
    path = tmp_path / "any.rec"
    path.write_bytes(b"")
    ended = CliRunner().invoke(main, ["replay", str(path), "--sandbox"])
    assert ended.exit_code == 2
    assert "--trust" in ended.output
