"""What looks like a secret isn't in a record; what a record holds is told before it is shared."""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import stat
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from click.testing import CliRunner

import tripwire
from tripwire.cli import main
from tripwire.recording.capture.outcomes import check_record
from tripwire.recording.format.file import Record

TOKEN = "hf_" + "aZ3kT9wQ5rB7xN1mC4vL8pY2sD6"
PASSWORD = "swordfish-42"
DATABASE = f"postgres://bob:{PASSWORD}@db.example/x"
OPTIONS = {"api_key": "k3y-of-mine", "lr": 0.1, "nested": [{"password": b"in-bytes-9"}]}


class Client:
    secret = "of-the-class-7"

    def __init__(self) -> None:
        self.auth_token = "of-the-object-8"
        self.scale = 2.0


class Text(str):
    __slots__ = ()


def make_closure():
    passphrase = "in-a-cell-5"

    def inner():
        return passphrase

    return inner


CLOSURE = make_closure()
CLIENT = Client()
PIECES = ["in-a-list-3"]
SECRETS = PIECES


def fails(x, client_secret, plain, access_key="a-default-6"):
    """Log in with password = 'in-a-docstring'."""
    # the old password: "in-a-comment-1"
    pwd = "in-the-source-4"
    Text(client_secret)
    if TOKEN and DATABASE and OPTIONS and CLIENT.auth_token and CLOSURE() and SECRETS and pwd:
        raise ValueError(f"{plain} was refused {PASSWORD}")
    return x


HIDDEN = [
    *(TOKEN, PASSWORD, "k3y-of-mine", "in-bytes-9", "of-the-class-7", "of-the-object-8"),
    *("in-a-cell-5", "in-a-list-3", "a-default-6", "in-the-source-4", "in-a-comment-1"),
    *("given-by-position-2", "in-a-docstring"),
]


def write(tmp_path: Path) -> Path:
    folder = tmp_path / "records"
    recorded = tripwire.record_on_error(folder)(fails)
    with pytest.raises(ValueError, match="was refused"):
        recorded(torch.ones(2), Text("given-by-position-2"), "a plain word")
    (path,) = folder.glob("*.rec")
    return path


def find_in(path: Path, text: str) -> bool:
    """Whether a text stands in the file, or in what one of its members holds."""
    with zipfile.ZipFile(path) as file:
        held = [file.read(name) for name in file.namelist()]
    return any(text.encode() in data for data in (path.read_bytes(), *held))


def test_a_secret_is_nowhere_in_a_record_wherever_it_stood(tmp_path):
    path = write(tmp_path)
    assert [text for text in HIDDEN if find_in(path, text)] == []
    for text in ("a plain word", "db.example", "scale", "nested"):
        assert find_in(path, text), text


def test_tripwire_redact_0_keeps_everything(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIPWIRE_REDACT", "0")
    path = write(tmp_path)
    elsewhere = {"in-bytes-9", "of-the-class-7"}  # in base64; not read, so not there
    assert {text for text in HIDDEN if not find_in(path, text)} == elsewhere
    with Record.open(path) as record:
        assert record.manifest.redacted == ()


def test_the_manifest_says_what_is_in_a_record_and_what_is_not(tmp_path):
    with Record.open(write(tmp_path)) as record:
        manifest = record.manifest
    for kind in ("source code", "texts", "values of tensors", "paths of files"):
        assert kind in manifest.holds
    assert "the message of an error" in manifest.holds
    assert {"api_key", "auth_token", "client_secret", "passphrase"} <= set(manifest.redacted)


def test_show_begins_with_what_one_would_share(tmp_path):
    shown = CliRunner().invoke(main, ["show", str(write(tmp_path))]).output.splitlines()
    assert shown[0].startswith("contains: source code")
    assert "values are redacted" in shown[1]
    assert "before you share it" in shown[2]


def test_a_replay_without_the_secrets_runs_and_says_so(tmp_path, caplog):
    path = write(tmp_path)
    with pytest.raises(ValueError, match="a plain word was refused <redacted"):
        tripwire.replay(path, trust=True)
    assert "values are redacted" in caplog.text
    told = CliRunner().invoke(main, ["replay", str(path), "--trust"]).output
    assert "It reproduces." in told
    assert "may end differently" in told


def test_the_verdict_of_a_record_without_its_secrets_says_so(tmp_path):
    verdict = check_record(write(tmp_path))
    assert verdict.outcome == "reproduces"
    assert "may end differently" in verdict.text


def test_equal_secrets_stay_equal_and_different_ones_different(tmp_path):
    first = {"password": "one-of-two-1"}

    def compares(x, other):
        if first["password"] == other:
            raise ValueError("equal")
        raise ValueError("different")

    for number, (other, said) in enumerate([("one-of-two-1", "equal"), ("x-22-y", "different")]):
        folder = tmp_path / str(number)
        with pytest.raises(ValueError, match=said):
            tripwire.record_on_error(folder)(compares)(torch.ones(1), other)
        (path,) = folder.glob("*.rec")
        with pytest.raises(ValueError, match=said):
            tripwire.replay(path, trust=True)


# fmt: off
LOGINS = (lambda x: x.log_in(user="bob", password="in-a-lambda-1")), (lambda x: x.nothing("\u20ac", secret="in-a-lambda-2"))  # noqa: E501
# fmt: on


@pytest.mark.parametrize("is_same_interpreter", [True, False])
@pytest.mark.parametrize("number", [0, 1])
def test_of_lambdas_in_one_line_each_is_found_again_without_its_secrets(
    tmp_path, monkeypatch, number, is_same_interpreter
):
    with pytest.raises(AttributeError) as raised:
        tripwire.record_on_error(tmp_path)(LOGINS[number])(torch.ones(1))
    (path,) = tmp_path.glob("*.rec")
    for secret in ("in-a-lambda-1", "in-a-lambda-2"):
        assert not find_in(path, secret), secret
    with Record.open(path) as record:
        (code,) = (code for code in record.table.codes if "lambda" in code.name)
        assert code.source is not None
    if not is_same_interpreter:  # it compiles the source
        monkeypatch.setattr("importlib.util.MAGIC_NUMBER", b"other")
    with pytest.raises(AttributeError, match=str(raised.value)):
        tripwire.replay(path, trust=True)


def test_a_replay_leaves_the_lines_that_later_records_are_made_of(tmp_path):
    for folder in ("first", "second"):
        with pytest.raises(AttributeError):
            tripwire.record_on_error(tmp_path / folder)(LOGINS[0])(torch.ones(1))
        (path,) = (tmp_path / folder).glob("*.rec")
        assert not find_in(path, "in-a-lambda-1")
        assert find_in(path, "LOGINS = (lambda x: ")
        with pytest.raises(AttributeError):
            tripwire.replay(path, trust=True)


@dataclasses.dataclass
class Login:
    user: str = "bob"
    password: str = "-".join(["of", "a", "dataclass"])


class Pair(NamedTuple):
    user: str
    api_key: str


class Account(enum.Enum):
    PASSWORD = "-".join(["of", "an", "enum"])


HOLDERS = [
    Login(password="-".join(["of", "an", "instance"])),
    Pair("bob", "-".join(["of", "a", "pair"])),
    Account.PASSWORD,
    functools.partial(print, password="-".join(["of", "a", "partial"])),
    {"name": "DB_PASSWORD", "value": "-".join(["of", "a", "setting"])},
    {"key": "api_key", "value": "-".join(["of", "a", "key"])},
    [("Authorization", "-".join(["of", "headers", "7"])), ("Accept", "text/html")],
    ["password", "-".join(["of", "a", "list", "7"])],
]


def holds(x):
    raise ValueError(str(len(HOLDERS)))


def test_fields_keywords_and_named_settings_tell_secrets(tmp_path):
    with pytest.raises(ValueError):
        tripwire.record_on_error(tmp_path)(holds)(torch.ones(1))
    (path,) = tmp_path.glob("*.rec")
    of = ("a-dataclass", "an-instance", "a-pair", "an-enum", "a-partial", "a-setting", "a-key")
    of += ("headers-7", "a-list-7")
    assert [text for text in of if find_in(path, f"of-{text}")] == []
    with pytest.raises(ValueError, match=str(len(HOLDERS))):
        tripwire.replay(path, trust=True)


def hand_on(x, secret, password="connect"):
    connect = x.log_in
    return connect(secret=secret, password=connect, api_key=x)


def test_what_code_hands_on_under_a_secrets_name_stays_code(tmp_path, monkeypatch):
    with pytest.raises(AttributeError, match="log_in"):
        tripwire.record_on_error(tmp_path)(hand_on)(torch.ones(1), "return")
    (path,) = tmp_path.glob("*.rec")
    assert find_in(path, "return connect(secret=secret, password=connect, api_key=x)")
    monkeypatch.setattr("importlib.util.MAGIC_NUMBER", b"other")  # so that the source is compiled
    with pytest.raises(AttributeError, match="log_in"):
        tripwire.replay(path, trust=True)


def test_a_call_that_needs_the_secret_is_told_to_differ(tmp_path):
    settings = {"password": "12345678"}

    def needs(x):
        if int(settings["password"]) > 0:
            raise ValueError("it was a number")

    with pytest.raises(ValueError, match="it was a number"):
        tripwire.record_on_error(tmp_path)(needs)(torch.ones(1))
    (path,) = tmp_path.glob("*.rec")
    verdict = check_record(path)
    assert verdict.outcome == "differs"
    assert "1 value is redacted (password)" in verdict.text


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_records_and_their_folders_are_for_this_user_alone(tmp_path):
    before = os.umask(0)
    try:
        path = write(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    check_record(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


UNSEEN = """
def log_in(x, user="me", **options):
    if options.get("n") == "kept-1":
        return x
    raise ValueError(user)


def fails(x, password):
    db_pw = "stored-1"
    if password == "compared-2":
        return x
    both = x, password == "beside-7"
    db_pw = "joined-8"; y = x
    options = {"api_key": "mapped-3", "user": "kept-2"}
    log_in(x, user="kept-3", password="passed-4")


def outer(x, password):
    def inner():
        secret = "inside-5"
        return fails(x, password)
    return inner()
"""


def test_code_without_a_source_holds_no_secret(tmp_path) -> None:
    names: dict = {"__name__": "unseen"}
    exec(compile(UNSEEN, "<nowhere>", "exec"), names)
    path = tripwire.record_call(tmp_path)(names["outer"], torch.ones(1), "given-6")
    with zipfile.ZipFile(path) as file:
        data = b"".join(map(file.read, file.namelist()))
    hidden = [b"stored-1", b"compared-2", b"mapped-3", b"passed-4", b"inside-5", b"given-6"]
    hidden += [b"beside-7", b"joined-8"]
    assert [text for text in hidden if text in data] == []
    assert [text for text in (b"kept-1", b"kept-2", b"kept-3") if text not in data] == []
