"""What others may do to a file of ours, or to the folder that it is in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SOMEBODY = 12345
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


def link_to_file(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def second_name(path: Path) -> None:
    os.link(path, path.with_name("elsewhere"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def writable_file(path: Path) -> None:
    path.chmod(0o620)


def writable_folder(path: Path) -> None:
    path.parent.chmod(0o770)


def file_given_away(path: Path) -> None:
    os.chown(path, SOMEBODY, -1)


def folder_given_away(path: Path) -> None:
    os.chown(path.parent, SOMEBODY, -1)


def parent_given_away(path: Path) -> None:
    os.chown(path.parent.parent, SOMEBODY, -1)


TRICKS = (
    *(link_to_file, second_name, pipe, folder, writable_file, writable_folder),
    *(
        pytest.param(trick, marks=AS_ROOT)
        for trick in (file_given_away, folder_given_away, parent_given_away)
    ),
)
