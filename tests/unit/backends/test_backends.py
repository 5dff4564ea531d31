"""Back ends by name: tripwire's own, Inductor, and those that torch.compile knows."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import check_same, forking, run_with_torch
from torch import nn
from torch.nn.modules import module as modules

import tripwire
import tripwire.backends.inductor
from tripwire.backends.handover import in_rounds
from tripwire.backends.registry import INDUCTOR_MODES, inductor
from tripwire.dispatch.compiled import find_dispatcher


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2))


def check_trains(backend, **options) -> None:
    """Results and gradients of compiled calls are the plain module's."""
    model, twin, x = build(), build(), torch.randn(3, 4)
    compiled = tripwire.compile(model, backend=backend, fullgraph=True, **options)
    for _ in range(3):
        given, wanted = compiled(x), twin(x)
        torch.testing.assert_close(given, wanted)
        given.square().sum().backward()
        wanted.square().sum().backward()
    for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad)
    assert compiled.statistics().hits == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_back_end_by_name_gives_results_and_gradients(backend) -> None:
    check_trains(backend)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "default", "lite", "max-autotune-no-cudagraphs"])
def test_inductor_gives_results_and_gradients(mode) -> None:
    check_trains("inductor", mode=mode)


def test_inductor_has_the_modes_that_the_installed_torch_has() -> None:
    assert set(torch._inductor.list_mode_options()) <= set(INDUCTOR_MODES)


def test_inductor_is_the_default(monkeypatch) -> None:
    monkeypatch.delenv("TRIPWIRE_BACKEND")
    model, x = build().eval(), torch.randn(3, 4)
    compiled = tripwire.compile(model)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
    assert find_dispatcher(compiled).options.backend is inductor
    assert compiled.statistics().traces == 1  # though Inductor was imported meanwhile


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "fastest"},
        {"options": {"no_such_option": 1}},
        {"mode": "default", "options": {}},
        {"on_backend_error": "ignore"},
    ],
)
def test_bad_options_are_errors(options) -> None:
    with pytest.raises(tripwire.BadOption):
        tripwire.compile(lambda x: x * 2, backend="inductor", **options)(torch.ones(2))


def test_what_the_back_end_eager_ignores_is_told_once(caplog) -> None:
    for number in (1, 2):
        compiled = tripwire.compile(lambda x, by: x * by, backend="eager", mode="default")
        for by in (1, 2, 3):
            compiled(torch.ones(number), by)
    assert [record.getMessage() for record in caplog.records] == [
        "the back end \"eager\" ignores mode='default'"
    ]


def test_options_reach_inductor() -> None:
    seen = []

    def look(graph):
        seen.append(len(graph.nodes))

    options = {"post_grad_custom_post_pass": look, "fx_graph_cache": False}
    compiled = tripwire.compile(lambda x: x.sin() * 2, backend="inductor", options=options)
    x = torch.ones(3)
    compiled(x)
    torch.testing.assert_close(compiled(x), x.sin() * 2)
    assert len(seen) == 1


# --- rounds of CUDA graphs ---------------------------------------------------------------------


class Refuses(nn.Module):
    """Not compiled as a whole; its two blocks are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = build_block(), build_block()

    def forward(self, x):
        time.monotonic()
        return self.second(self.first(x))


def build_block():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_each_call_is_a_round_and_so_is_one_whose_modules_are_compiled() -> None:
    """Else the second block would take the memory that holds the first one's result."""
    options = {"triton.cudagraphs": True, "fx_graph_cache": False}
    for model in (build_block(), Refuses()):
        compiled = tripwire.compile(model.eval(), backend="inductor", options=options)
        x = torch.randn(2, 4)
        with torch.no_grad():
            wanted = model(x)
            for _ in range(5):
                compiled(x)
            from torch._dynamo.mutation_guard import GenerationTracker

            before = GenerationTracker.generation
            for _ in range(3):
                torch.testing.assert_close(compiled(x), wanted)
        assert GenerationTracker.generation - before == 3


class Cache:
    def __init__(self) -> None:
        self.keys = torch.zeros(4, 2)
        self.seen = torch.zeros(2)


def find_staying(monkeypatch, fn, *args) -> list[str]:
    """The inputs that Inductor is told to use where they are."""
    from torch._inductor import compile_fx as inductor

    found = []
    compile_fx = inductor.compile_fx

    def spy(module, *rest, **options):
        inputs = module.graph.find_nodes(op="placeholder")
        found.extend(node.name for node in inputs if "tensor_dict" in node.meta)
        return compile_fx(module, *rest, **options)

    monkeypatch.setattr(inductor, "compile_fx", spy)
    options = {"triton.cudagraphs": True, "fx_graph_cache": False}
    compiled = tripwire.compile(fn, backend="inductor", options=options)
    with torch.no_grad():
        for _ in range(3):
            compiled(*args)
    assert compiled.statistics().hits == 2
    return list(dict.fromkeys(found))  # it calls itself


def test_a_cache_that_is_passed_and_changed_stays_where_it_is(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRIPWIRE_CACHE_DIR", "")
    cache, x = Cache(), torch.ones(2)

    def f(x, cache, step):
        cache.keys.index_copy_(0, step, x[None])
        return cache.keys.sum() + cache.seen

    (name,) = find_staying(monkeypatch, f, x, cache, torch.tensor([1]))
    assert "keys" in name  # `seen` is only read, and copied: it may be another each time


def test_a_marked_input_stays_where_it_is(monkeypatch) -> None:
    monkeypatch.setenv("TRIPWIRE_CACHE_DIR", "")
    x, y = torch.ones(2), torch.ones(2)
    torch._dynamo.mark_static_address(y)
    assert find_staying(monkeypatch, lambda x, y: x + y, x, y) == ["y"]


def test_what_stays_but_begins_elsewhere_runs_the_plain_graph() -> None:
    def kernel(*inputs):
        return "compiled"

    base = torch.zeros(8)
    run = in_rounds(kernel, [1], lambda *inputs: "plain")
    assert [run(base[1:], base[i:]) for i in (0, 4, 1)] == ["compiled", "compiled", "plain"]


# --- a back end that fails ---------------------------------------------------------------------


def broken(module, inputs):
    raise RuntimeError("no such luck")


def test_the_graph_is_kept_for_inspection() -> None:
    with pytest.raises(tripwire.BackendFailed, match="broken.*no such luck") as caught:
        tripwire.compile(lambda x: x * 2, backend=broken)(torch.ones(2))
    assert isinstance(caught.value.__cause__, RuntimeError)
    (result,) = caught.value.graph_module(torch.ones(2))
    assert result.tolist() == [2.0, 2.0]


def test_the_graph_runs_as_it_is_if_asked(caplog) -> None:
    compiled = tripwire.compile(lambda x: x * 2, backend=broken, on_backend_error="eager")
    for _ in range(3):
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert compiled.statistics().hits == 2
    assert caplog.text.count("no such luck") == 1
    (refusal,) = find_dispatcher(compiled).refusals
    assert refusal.slug == "backend-failed"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_rows_are_shuffled_as_in_plain_code(backend, caplog) -> None:
    """`x[torch.randperm(len(x))]`, which Inductor of torch 2.13 raises on."""

    def mix(x, weight):
        order = torch.randperm(x.size(0))
        return weight * x + (1 - weight) * x[order], x.index_select(0, order), order

    compiled = tripwire.compile(mix, backend=backend)
    for rows in (4, 4, 6, 7):
        x = torch.randn(rows, 3)
        torch.manual_seed(rows)
        expected = mix(x, 0.25)
        torch.manual_seed(rows)
        torch.testing.assert_close(compiled(x, 0.25), expected)
    assert (compiled.statistics().traces, compiled.statistics().refusals) == (2, 0)
    assert not caplog.text


@pytest.mark.parametrize("varies", ["a number", "a size", "a number out of a tensor"])
def test_what_varies_stays_open_if_the_back_end_fails_anyway(varies) -> None:
    def program(x, scale, n):
        return x * scale + x[: int(n)].sum()

    compiled = tripwire.compile(program, backend=broken, on_backend_error="eager")
    for turn in range(12):
        x = torch.ones(9 + (turn if varies == "a size" else 0))
        scale = 0.3 * turn if varies == "a number" else 1.0
        n = torch.tensor(2 + (turn % 6 if varies == "a number out of a tensor" else 0))
        torch.testing.assert_close(compiled(x, scale, n), program(x, scale, n))
    assert compiled.statistics().traces <= 3


def test_a_back_end_that_says_thousands_of_lines_is_told_in_a_few(caplog) -> None:
    def talkative(module, inputs):
        noise = "\n".join(f"warning {n} {'x' * 1000}" for n in range(5_000))
        raise ValueError(f"C++ compile error\n{noise}\nfatal error: No space left on device")

    compiled = tripwire.compile(lambda x: x * 2, backend=talkative, on_backend_error="eager")
    compiled(torch.ones(2))
    assert "C++ compile error" in caplog.text
    assert "[4,990 more lines]" in caplog.text
    assert "fatal error: No space left on device" in caplog.text
    assert len(caplog.text) < 6_000


def test_code_that_fails_where_plain_code_does_not_is_told(caplog) -> None:
    def fails(module, inputs):
        def run(*inputs):
            raise RuntimeError("no such luck")

        return run

    compiled = tripwire.compile(lambda x: x * 2, backend=fails)
    for _ in range(3):
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert caplog.text.count("no such luck") == 1
    (refusal,) = find_dispatcher(compiled).refusals
    assert refusal.slug == "backend-failed"


# --- warm starts -------------------------------------------------------------------------------

WARM = """
import logging, torch, tripwire
from torch import nn
from torch._dynamo.utils import counters

logging.basicConfig(level=logging.WARNING)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
x = torch.randn(3, 4)
compiled = tripwire.compile(model, backend="inductor")
with torch.set_grad_enabled({grad}):
    for _ in range(2):
        given, wanted = compiled(x), model(x)
        torch.testing.assert_close(given, wanted)
    if {grad}:
        given.sum().backward()
print(sorted(counters["aot_autograd"].items()))
"""


VECTORS = {"TORCHINDUCTOR_VEC_ISA_OK": "1"}  # a new folder would have each tried, with a compiler
# For one kernel, headers take longer to compile than they save.
QUICKLY = {**VECTORS, "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
UNNAMED = "import os; os.environ.pop('TORCHINDUCTOR_CACHE_DIR', None)\n"


def start(own: Path, shared: Path) -> str:
    """A process whose store is `own`, and whose $TMPDIR is one for all users."""
    env = {**QUICKLY, "TRIPWIRE_CACHE_DIR": str(own), "TMPDIR": str(shared)}
    return run_with_torch(UNNAMED + WARM.format(grad=False), env=env).strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """A store that one process has filled, and the folder for temporary files that it had."""
    own, shared = tmp_path_factory.mktemp("own"), tmp_path_factory.mktemp("shared")
    shared.chmod(0o1777)
    assert "autograd_cache_miss" in start(own, shared)
    return own, shared


def test_a_damaged_artifact_is_written_anew_and_serves_the_next_start(built) -> None:
    own, shared = built
    (path,) = own.rglob("*.bin")
    path.write_bytes(path.read_bytes()[:-10])
    assert "autograd_cache_hit" in start(own, shared)
    assert start(own, shared) == "[]"  # torch was asked nothing


def test_a_store_in_a_path_with_a_space_is_used_and_torch_builds_elsewhere(tmp_path) -> None:
    """torch splits the commands that it gives to a compiler where a space is."""
    own, shared = tmp_path / "with space" / "own", tmp_path / "shared"
    shared.mkdir(mode=0o700)
    assert "autograd_cache_miss" in start(own, shared)
    assert len([*own.rglob("*.bin")]) == 1
    assert [*own.rglob("*.so")] == []
    assert start(own, shared) == "[]"  # torch was asked nothing


@pytest.mark.parametrize("trains", [False, True])
def test_code_with_autocast_inside_is_in_the_store(trains, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRIPWIRE_CACHE_DIR", str(tmp_path))
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(4, 8)

    def call(x, dtype):
        with torch.autocast("cpu", dtype=dtype):
            y = x @ weight
            with torch.autocast("cpu", enabled=False):
                y = y.float() @ weight
        return y.relu()

    def check(dtype) -> None:
        fast = tripwire.compile(call, backend="inductor", fullgraph=True)
        for _ in range(3):
            with torch.set_grad_enabled(trains):
                got, expected = fast(x, dtype), call(x, dtype)
            torch.testing.assert_close(got, expected)
            if trains:
                gradients = [torch.autograd.grad(y.sum(), weight) for y in (got, expected)]
                torch.testing.assert_close(*gradients, rtol=0.02, atol=0.05)

    check(torch.bfloat16)
    check(torch.float16)
    assert len(list(tmp_path.rglob("*.bin"))) == 2
    monkeypatch.setattr(
        tripwire.backends.inductor, "import_compiler", lambda: pytest.fail("it is compiled")
    )
    check(torch.bfloat16)
    check(torch.float16)


EVIL = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) {{ fclose(fopen("{marker}", "w")); }}
"""


def plant(kernels: Path, shared: Path, marker: Path) -> None:
    """Everything that torch built, under the same names in a folder of somebody's, as a trap."""
    source = shared / "evil.c"
    source.write_text(EVIL.format(marker=marker))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shared / "evil.so", source], check=True)
    for built in kernels.rglob("*"):
        if built.suffix in (".so", ".py"):
            for folder in (shared, shared / f"torchinductor_{getpass.getuser()}"):
                trap = folder / built.relative_to(kernels)
                trap.parent.mkdir(parents=True, exist_ok=True)
                if built.suffix == ".so":
                    shutil.copy(shared / "evil.so", trap)
                else:
                    trap.write_text(f"open({str(marker)!r}, 'w')\n{built.read_text()}")
    for folder in (shared, *shared.rglob("*")):
        folder.chmod(0o1777)


def test_the_store_serves_a_warm_start_and_loads_nothing_that_another_user_planted(built) -> None:
    """torch's own folder is one under $TMPDIR with a name that anyone can foretell."""
    own, shared = built
    marker = own / "marker"
    assert list((own / "torch").rglob("*.so"))
    assert not list(shared.rglob("*.so"))
    plant(own / "torch", shared, marker)
    assert start(own, shared) == "[]"  # torch was asked nothing
    assert not marker.exists()


@pytest.mark.slow
def test_a_library_that_another_user_planted_in_a_folder_that_is_named_isnt_loaded(
    tmp_path,
) -> None:
    own, shared, marker = tmp_path / "own", tmp_path / "shared", tmp_path / "marker"
    shared.mkdir()
    shared.chmod(0o1777)
    folders = {"TRIPWIRE_CACHE_DIR": str(own), "TORCHINDUCTOR_CACHE_DIR": str(shared)}
    env, code = {**QUICKLY, **folders, "TMPDIR": str(shared)}, WARM.format(grad=False)
    run_with_torch(code, env=env)
    assert list((own / "torch").rglob("*.so"))
    assert not list(shared.rglob("*.so"))
    plant(own / "torch", shared, marker)
    assert run_with_torch(code, env=env).strip() == "[]"
    assert not marker.exists()


def test_headers_that_another_user_compiled_arent_used(tmp_path, monkeypatch) -> None:
    """They would go into every library; torch has them under $TMPDIR, whatever is named."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # Inductor sets it by itself
    shared = tmp_path / "shared"
    headers = shared / f"torchinductor_{getpass.getuser()}" / "precompiled_headers"
    headers.mkdir(parents=True)
    headers.chmod(0o777)
    env = {"TMPDIR": str(shared), "TRIPWIRE_CACHE_DIR": str(tmp_path / "own")}
    told = run_with_torch(
        "from tripwire.backends.inductor import _settle_kernels, codecache, find_store\n"
        "before = codecache._HEADER_DIR\n"
        "_settle_kernels(find_store())\n"
        "print(before, codecache._HEADER_DIR)",
        env=env,
    )
    assert told.split() == [str(headers), str(tmp_path / "own/torch/precompiled_headers")]


SETTLE = """
import os
from tripwire.backends.inductor import _settle_kernels, find_store
for _ in range(2):
    _settle_kernels(find_store())
print(os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ.get("TRITON_CACHE_DIR"))
"""


@pytest.fixture(scope="module")
def settle() -> Iterator[Callable[[dict[str, str]], list[str]]]:
    """Where kernels go in a process with these variables."""
    with forking("tripwire.backends.inductor") as run:
        unnamed = {name: value for name, value in os.environ.items() if "_CACHE_DIR" not in name}
        yield lambda env: run(SETTLE, {**unnamed, **env}).stdout.split()


@pytest.mark.parametrize("trick", ["none", "folder", "file", "link", "closed"])
def test_a_folder_that_the_user_names_is_used_if_nobody_else_may_write_in_it(
    tmp_path, trick, settle
) -> None:
    named, triton, own = tmp_path / "named", tmp_path / "triton", tmp_path / "own"
    for folder in (named, triton):
        (folder / "ab").mkdir(parents=True)
        library = folder / "ab" / "kernel.so"
        library.touch()
        for path in (folder, folder / "ab", library):
            path.chmod(0o755)
        if trick in ("folder", "closed"):
            (folder / "ab").chmod(0o775)
        if trick == "file":
            library.chmod(0o666)
        if trick == "link":
            library.unlink()
            library.symlink_to("/tmp/kernel.so")
        if trick == "closed":  # what nobody else can enter holds nothing of theirs
            folder.chmod(0o700)
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(named),
        "TRITON_CACHE_DIR": str(triton),
        "TRIPWIRE_CACHE_DIR": str(own),
    }
    is_used = trick in ("none", "closed")
    assert settle(env) == ([str(named), str(triton)] if is_used else [str(own / "torch"), "None"])


@pytest.mark.parametrize("store", ["", "taken"])
def test_without_a_store_torchs_own_folder_is_used_if_nobody_else_may_have_written_there(
    tmp_path, store, settle
) -> None:
    torchs = tmp_path / f"torchinductor_{getpass.getuser()}"
    if store:
        (tmp_path / "taken" / "something").mkdir(parents=True)
        store = str(tmp_path / "taken")
    env = {"TMPDIR": str(tmp_path), "TRIPWIRE_CACHE_DIR": store}
    assert settle(env) == [str(torchs), "None"]
    (torchs / "ab").mkdir()
    (torchs / "ab").chmod(0o777)
    torchs.chmod(0o755)
    chosen = Path(settle(env)[0])
    assert chosen.parent == tmp_path and chosen.name.startswith("tripwire-kernels-")
    assert not chosen.exists()


TRAIN = """
import logging, torch, tripwire
from torch import nn
from torch._dynamo.utils import counters

logging.basicConfig(level=logging.WARNING)
twice = nn.Linear(4, 4), nn.Linear(4, 4)
norm = nn.BatchNorm1d(4)

def heads(x):  # a loss of one of them leaves the other without a gradient
    return twice[0](x), twice[1](x)

def cast(x):
    return twice[0](x).relu(), x.sin()

def writes(x):
    y = x * 2
    y.mul_(twice[0].weight.sum())
    return norm(y), y[0]

def play(fn, x, plain):
    torch.manual_seed(0)
    for module in (*twice, norm):
        module.reset_parameters()
        module.zero_grad()
    told = []
    for number in range(3):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=plain is cast):
            one, other = fn(given * 1)
        for _ in range(2):  # retained, then not
            one.float().square().sum().backward(retain_graph=not _)
        told += [one.detach(), other.detach(), given.grad]
        told += [p.grad for m in (*twice, norm) for p in m.parameters()]
        told += [norm.running_mean.clone(), norm.running_var.clone()]
    return told

x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
for fn in (heads, cast, writes):
    compiled = tripwire.compile(fn, backend="inductor")
    wanted = play(fn, x, fn)
    given = play(compiled, x, fn)
    assert [v is None for v in given] == [v is None for v in wanted], fn
    assert any(v is None for v in wanted)
    for a, b in zip(given, wanted):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert compiled.statistics().hits == 2, compiled.statistics()
print(sorted(counters["aot_autograd"].items()), sorted(counters["fxgraph_cache"].items()))
"""


def test_the_store_serves_a_warm_start_of_training(tmp_path) -> None:
    env = {**QUICKLY, "TRIPWIRE_CACHE_DIR": str(tmp_path / "own")}
    cold, warm = (run_with_torch(UNNAMED + TRAIN, env=env) for _ in range(2))
    assert "autograd_cache_miss" in cold
    assert len(list((tmp_path / "own").rglob("*.bin"))) == 3
    assert warm.strip() == "[] []"  # nothing was compiled, and torch was asked nothing


def test_a_backward_that_cant_be_compiled_costs_its_forward_nothing(
    monkeypatch, tmp_path, caplog
) -> None:
    caplog.set_level("INFO", logger="tripwire.backends")
    from torch._inductor import compile_fx as inductor

    monkeypatch.setenv("TRIPWIRE_CACHE_DIR", str(tmp_path / "own"))
    compile_inner = inductor.compile_fx_inner

    def fails(module, inputs, is_backward=False, **settings):
        if is_backward:
            raise RuntimeError("no such luck")
        return compile_inner(module, inputs, **settings)

    monkeypatch.setattr(inductor, "compile_fx_inner", fails)
    compiled = tripwire.compile(lambda x: x.sin() * 4.75, backend="inductor")
    for number in range(3):
        x = torch.full((3,), float(number), requires_grad=True)
        compiled(x).sum().backward()
        torch.testing.assert_close(x.grad, x.detach().cos() * 4.75)
    assert compiled.statistics().hits == 2
    assert not list((tmp_path / "own").rglob("*.bin"))
    assert "the backward put off and nothing kept: " in caplog.text


def test_all_back_ends_that_torch_knows_are_listed() -> None:
    assert {"eager", "inductor", "aot_eager"} <= set(tripwire.list_backends())


def test_nothing_of_inductor_or_dynamo_is_imported_before_it_is_used() -> None:
    told = run_with_torch(
        "import sys, torch, tripwire\n"
        "before = set(sys.modules)\n"
        "f = tripwire.compile(lambda x: x + 1, backend='inductor')\n"
        "new = set(sys.modules) - before\n"
        "print(sorted(m for m in new if m in ('torch._dynamo', 'torch._inductor')))"
    )
    assert told.strip() == "[]"


class Counts(nn.Module):
    """Writes to a buffer, and reads its argument after that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen.add_(1)
        return x * 2 + self.seen


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_argument_that_shares_memory_with_state_is_read_after_the_write(backend) -> None:
    """AOTAutograd reads inputs first: such a call isn't for its code."""
    model, twin = Counts(), Counts()
    compiled = tripwire.compile(model, backend=backend)
    for pick in (torch.ones_like, torch.ones_like, torch.detach, torch.clone, torch.detach):
        torch.testing.assert_close(compiled(pick(model.seen)), twin(pick(twin.seen)))
    assert compiled.statistics().hits >= 2


def test_what_inductors_phases_took_is_in_the_compiles_metrics(monkeypatch, tmp_path) -> None:
    from tripwire import telemetry

    monkeypatch.setenv("TRIPWIRE_CACHE_DIR", "")
    telemetry.clear_compilation_metrics()
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = tripwire.compile(lambda x: x.sin() * 3.25, backend="inductor")
        compiled(torch.ones(3, requires_grad=True))
    (found,) = telemetry.get_compilation_metrics()
    for column in (
        "aot_autograd_time_us",
        "inductor_time_us",
        "code_gen_time_us",
        "pre_grad_pass_time_us",
        "joint_graph_pass_time_us",
        "post_grad_pass_time_us",
    ):
        assert 0 < (getattr(found, column) or 0) <= found.duration_us, column
    assert found.graph_output_count == 1
    assert found.accumulated_cache_size >= 1


def turning_gradients_on(x):
    with torch.enable_grad():
        return x * 2


@pytest.mark.parametrize("fn", [turning_gradients_on, torch.relu])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_code_that_torch_kept_for_no_grad_is_not_for_inference_mode(fn, mode) -> None:
    """Torch's key is the same for both, and only in one of them can a graph turn gradients on."""
    kept = []

    def backend(module, examples):
        kept.append(torch._functorch.config.enable_autograd_cache)
        return module.forward

    with mode(), torch._functorch.config.patch(enable_autograd_cache=True):
        tripwire.compile(fn, backend=backend)(torch.ones(2, requires_grad=True))
    assert kept == [not (fn is turning_gradients_on and mode is torch.inference_mode)]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_hooks_on_all_modules_are_not_called_for_a_compilers_own_modules(backend, trains) -> None:
    """A hook that computes would be recorded, registered, and recorded again, without end."""
    seen: list[str] = []

    def on_buffer(module: nn.Module, name: str, buffer: torch.Tensor) -> torch.Tensor:
        seen.append(type(module).__name__)
        assert len(seen) < 10
        return buffer * 3

    def call(x: torch.Tensor) -> torch.Tensor:
        tiny = nn.Module()
        tiny.register_buffer("b", torch.ones(4))
        return x * tiny.b + torch.tensor([1.0, 2.0, 3.0, 4.0])

    handle = modules.register_module_buffer_registration_hook(on_buffer)
    try:
        compiled = tripwire.compile(call, backend=backend)
        x = torch.randn(4, requires_grad=trains)
        for turn in range(1, 4):
            got = compiled(x)
            torch.testing.assert_close(got, x * 3 + torch.tensor([1.0, 2.0, 3.0, 4.0]))
            if trains:
                got.sum().backward()
            assert seen == ["Module"] * turn
    finally:
        handle.remove()


def test_a_graphs_python_code_is_made_when_it_is_first_run():
    graphs = []

    def keep(graph, examples):
        graphs.append(graph)
        return graph.forward

    compiled = tripwire.compile(lambda x: x.relu() + 1, backend=keep)
    x = torch.randn(3)
    compiled(x)
    (graph,) = graphs
    assert graph._needs_recompile()
    check_same(x.relu() + 1, compiled(x))
    assert not graph._needs_recompile()
    assert "relu" in graph.code


def test_a_graph_that_raises_prints_nothing(capsys):
    def keep(graph, examples):
        return graph.forward

    compiled = tripwire.compile(lambda x, i: x[i], backend=keep)
    x = torch.randn(3)
    for _ in range(2):
        compiled(x, torch.tensor([1]))
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([5]))
    assert compiled.statistics().hits
    assert capsys.readouterr() == ("", "")


@pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning")
def test_a_back_end_may_script_the_graph():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    compiled = tripwire.compile(layer, backend=lambda graph, examples: torch.jit.script(graph))
    with torch.no_grad():
        for _ in range(3):
            check_same(layer(x), compiled(x))
    assert compiled.statistics().hits == 2


def test_a_failure_without_an_end_is_told_as_a_sentence(caplog) -> None:
    def fails(module, examples):
        raise ValueError("I can't")

    compiled = tripwire.compile(lambda x: x * 2, backend=fails, on_backend_error="eager")
    for _ in range(3):
        compiled(torch.ones(3))
    assert "ValueError: I can't. The graph runs uncompiled." in caplog.text
