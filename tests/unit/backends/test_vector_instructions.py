"""Of the sets of vector instructions that a processor offers, the best is tried, and no other."""

from __future__ import annotations

import functools
import platform

import pytest

inductor = pytest.importorskip("tripwire.backends.inductor")
config = inductor.torch._inductor.config
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not inductor._find_offered(),
    reason="this processor offers no choice",
)


class Offered:
    def __init__(self, passes: bool) -> None:
        self.passes = passes
        self.tried = 0

    def __bool__(self) -> bool:
        if config.cpp.vec_isa_ok is not None:
            return True
        self.tried += 1
        return self.passes

    def __str__(self) -> str:
        return ""


@pytest.fixture
def offer(monkeypatch):
    def offer(*passes: bool) -> list[Offered]:
        offered = [Offered(one) for one in passes]
        monkeypatch.setattr(inductor.cpu_vec_isa, "supported_vec_isa_list", offered)
        plain = inductor.cpu_vec_isa.valid_vec_isa_list.__wrapped__
        monkeypatch.setattr(inductor, "_TRIED", functools.cache(plain))
        return offered

    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    with config.patch({"cpp.vec_isa_ok": None, "cpp.simdlen": None}):
        yield offer


def test_where_the_best_passes_no_other_is_tried(offer) -> None:
    offered = offer(True, True, True)
    inductor._try_best_isa()
    assert inductor._TRIED()[0] is offered[0]
    assert [one.tried for one in offered] == [1, 0, 0]
    assert inductor._has_best_isa()
    assert config.cpp.vec_isa_ok is None


def test_where_it_fails_inductor_tries_them_all(offer) -> None:
    offered = offer(False, True)
    inductor._try_best_isa()
    assert inductor._TRIED() == [offered[1]]
    assert not inductor._has_best_isa()


@pytest.mark.parametrize("name", ["ATEN_CPU_CAPABILITY", "simdlen", "vec_isa_ok"])
def test_where_the_user_chooses_nothing_is_skipped(offer, monkeypatch, name) -> None:
    offered = offer(True, True)
    chosen = {}
    if name == "ATEN_CPU_CAPABILITY":
        monkeypatch.setenv(name, "avx2")
    else:
        chosen[f"cpp.{name}"] = 256
    with config.patch(chosen):
        inductor._try_best_isa()
    assert [one.tried for one in offered] == [0, 0]
    assert not inductor._TRIED.cache_info().currsize


def test_no_library_is_built_for_the_others(monkeypatch) -> None:
    """With the sets that this processor really has."""
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(inductor, "_TRIED", functools.cache(inductor._TRIED.__wrapped__))
    built = []

    def build(isa, code):
        built.append(str(isa))
        return True

    monkeypatch.setattr(inductor.cpu_vec_isa.VecISA, "check_build", build)
    with config.patch({"cpp.vec_isa_ok": None, "cpp.simdlen": None}):
        inductor._skip_trials()
        assert built == []
        assert inductor._TRIED() == inductor._find_offered()
    assert inductor.cpu_vec_isa.VecISA.check_build is build
