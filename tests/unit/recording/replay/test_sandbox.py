"""`tripwire replay --trust --sandbox`: no network, and no writes but to a temporary folder."""

from __future__ import annotations

import os
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
from tripwire.recording.replay import sandbox
from tripwire.recording.replay.sandbox import find_command


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


def write_leaver(tmp_path: Path) -> Path:
    """A record of a call that looks for a way out, and says which ways there are."""
    place = str(tmp_path)

    def leaves(x):
        import os
        import socket

        ways = []
        with socket.socket(socket.AF_UNIX) as agent:
            if not agent.connect_ex(f"{place}/agent"):
                ways.append("a socket")
        for name, flags in (("pipe", os.O_WRONLY | os.O_NONBLOCK), ("key", os.O_RDONLY)):
            try:
                os.open(f"{place}/{name}", flags)
                ways.append(name)
            except OSError:
                pass
        for stream in (0, 1, 2):
            try:
                os.ftruncate(os.open(f"/proc/self/fd/{stream}", os.O_RDWR), 0)
                ways.append(f"stream {stream}")
            except OSError:
                pass
        ways += [name for name in os.environ if "UNTOLD" in name]
        raise ValueError("ways out: " + (", ".join(ways) or "none"))

    with pytest.raises(ValueError, match="a socket, pipe, key"):
        tripwire.record_on_error(tmp_path / "records")(leaves)(torch.ones(1))
    (path,) = (tmp_path / "records").glob("*.rec")
    return path


@needs_sandbox
def test_no_socket_pipe_file_stream_or_variable_leads_out_of_a_sandbox(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNTOLD", "1")
    given, told, (said, key) = tmp_path / "given", tmp_path / "told", (b"before\n", b"private")
    for path, content in ((given, b"precious"), (told, said), (tmp_path / "key", key)):
        path.write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind("agent")
        agent.listen()
        with open(os.devnull, "rb+") as nothing:
            saved = [os.dup(stream) for stream in (0, 1, 2)]
            try:  # pytest's own streams aren't the call's to cut off
                for stream in (0, 1, 2):
                    os.dup2(nothing.fileno(), stream)
                path = write_leaver(tmp_path)
            finally:
                for stream, before in enumerate(saved):
                    os.dup2(before, stream)
                    os.close(before)
        command = [sys.executable, "-m", "tripwire", "replay", str(path), "--trust", "--sandbox"]
        with given.open("rb") as stdin, told.open("ab") as stdout:
            subprocess.run(command, stdin=stdin, stdout=stdout, stderr=stdout, check=False)
    os.close(reader)
    assert b"replayed: ValueError: ways out: none" in told.read_bytes()
    assert told.read_bytes().startswith(said)
    assert given.read_bytes() == b"precious"


def test_what_is_said_in_a_sandbox_cant_command_a_terminal(capfdbinary):
    said = r"""
import sys
print('\x1b[2Jred\x9b1m\a\x7f', 'ä\tb')
sys.stderr.write('\x1b]0;title')
exit(3)"""
    assert sandbox._run([sys.executable, "-X", "utf8", "-c", said]) == 3
    out, err = capfdbinary.readouterr()
    assert out.decode() == "\\u001b[2Jred\\u009b1m\\u0007\\u007f ä\tb\n"
    assert err == b"\\u001b]0;title"


def test_without_bubblewrap_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    path = tmp_path / "any.rec"
    path.write_bytes(b"")
    ended = CliRunner().invoke(main, ["replay", str(path), "--trust", "--sandbox"])
    assert ended.exit_code == 2
    assert "install bubblewrap" in ended.output


def test_there_is_no_debugger_in_a_sandbox(tmp_path):
    path = tmp_path / "any.rec"
    path.write_bytes(b"")
    ended = CliRunner().invoke(main, ["replay", str(path), "--trust", "--sandbox", "--pdb"])
    assert ended.exit_code == 2
    assert "--pdb" in ended.output


def test_a_sandbox_is_no_trust(tmp_path):
    path = tmp_path / "any.rec"
    path.write_bytes(b"")
    ended = CliRunner().invoke(main, ["replay", str(path), "--sandbox"])
    assert ended.exit_code == 2
    assert "--trust" in ended.output
