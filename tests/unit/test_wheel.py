"""A wheel is built as `python -m build` does, with and without a compiler; it works on its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMOKE = """
import torch, tripwire
from tripwire.writes import sentry
net = torch.nn.Linear(3, 2)
compiled = tripwire.compile(net, backend="eager")
x = torch.ones(1, 3)
for _ in range(3):
    assert torch.equal(compiled(x), net(x))
net.bias = None
assert torch.equal(compiled(x), net(x))
assert (compiled.statistics().hits, compiled.statistics().retired) == (2, 1)
print(tripwire.__file__)
print(sentry.IS_COMPILED)
"""


@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_wheel_is_built_installed_and_used(tmp_path, has_compiler) -> None:
    if has_compiler and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    leave_out = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=leave_out)
    alone = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRIPWIRE_PURE")}
    compiler = {} if has_compiler else {"CC": "no-such-compiler"}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    pack = "from setuptools import build_meta; build_meta.build_sdist('..')"
    subprocess.run(
        [sys.executable, "-c", pack], cwd=source, check=True, env=alone, capture_output=True
    )
    (archive,) = tmp_path.glob("*.tar.gz")  # the wheel is made of what is in it
    build = [*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", tmp_path]
    subprocess.run([*build, archive], check=True, env=alone | compiler)
    (wheel,) = tmp_path.glob("*.whl")

    empty = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", empty], check=True)
    python = empty / "bin" / "python"
    subprocess.run(
        [*pip, "--python", python, "install", "--no-deps", "--no-index", wheel],
        check=True,
        env=alone,
    )
    packages = next(empty.glob("lib/python*/site-packages"))
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib"))  # torch and the others
    done = subprocess.run(
        [python, "-c", SMOKE], cwd=tmp_path, env=alone, check=True, capture_output=True, text=True
    )
    file, is_compiled = done.stdout.splitlines()[-2:]
    assert Path(file).is_relative_to(empty)
    assert is_compiled == str(has_compiler)
