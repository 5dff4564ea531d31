"""The pipeline: a miss goes through its stages in their order; making an entry runs nothing."""

import pytest
import torch

import tripwire
from tripwire.dispatch import pipeline
from tripwire.dispatch.entry import Entry
from tripwire.dispatch.pipeline import Pipeline
from tripwire.errors import BackendFailed
from tripwire.tracing import Tracer
from tripwire.validity.plan import build_plan
from tripwire.validity.standing import Standing

X = torch.ones(3)


def double(x):
    return x * 2


def test_a_miss_is_observed_planned_compiled_and_becomes_an_entry(monkeypatch) -> None:
    seen = []

    def note(owner, name, stage):
        whole = getattr(owner, name)

        def noting(*args, **kwargs):
            seen.append(stage)
            return whole(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    note(Pipeline, "observe", "observe")
    note(pipeline, "build_plan", "plan")
    note(Pipeline, "compile", "compile")
    note(pipeline, "Entry", "entry")
    compiled = tripwire.compile(double, backend="eager")
    assert compiled(X).tolist() == [2.0] * 3
    assert seen == ["observe", "plan", "compile", "entry"]
    assert compiled(X).tolist() == [2.0] * 3
    assert len(seen) == 4


def test_making_an_entry_runs_neither_a_compiler_nor_its_code() -> None:
    def never(*_):
        pytest.fail("it ran")

    run = Tracer().run(double, (X,), {}, complete=True)
    assert run.trace is not None
    standing = Standing(never)
    assert standing.admits((X,), {}) is None
    plan = build_plan(run.trace, run.torch_state, standing)
    entry = Entry(run.trace, plan, standing, never)
    assert str(entry.standing) == "in use"
    assert entry.standing.admits((X,), {}) is not None
    standing.close()
    assert str(entry.standing) == "gone"
    assert entry.standing.admits((X,), {}) is None


@pytest.mark.parametrize(
    "around", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")]
)
def test_a_back_end_that_fails_inside_a_context_leaves_it(around) -> None:
    def call(x):
        with around():
            return (x @ x).sum()

    def fail(module, examples):
        nodes = module.graph.nodes
        with module.graph.inserting_after(next(n for n in nodes if n.name == "sum_1")):
            module.graph.call_function(_raise)
        module.recompile()
        module(*examples)

    compiled = tripwire.compile(call, backend=fail)
    for _ in range(3):
        with pytest.raises(BackendFailed, match="no code for this"):
            compiled(torch.ones(2, 2))
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_autocast_enabled("cpu")


def _raise():
    raise RuntimeError("no code for this")
