"""Entry: one compiled specialisation. Guards on the call, wires on the world, code to run.

An entry whose wire tripped is *retired*: it isn't used again unless the value that it was
traced with comes back. While retired it holds no tensor, so what was replaced can die.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from tripwire.backends.registry import Runtime
from tripwire.tracing.result import Trace
from tripwire.tracing.sources import Roots
from tripwire.tracing.structure import Building, TensorPlan
from tripwire.tracing.torchstate import restoring_contexts
from tripwire.validity.plan import Plan, build_plan
from tripwire.validity.wires import NOBODY, Cause, Writers

_NO_ROOTS = Roots({}, None, {})


class Entry:
    """One trace, armed."""

    def __init__(
        self,
        trace: Trace,
        torch_state: tuple[object, ...],
        compile_graph: Callable[[Trace], Runtime],
        on_retired: Callable[[Entry, Cause], None],
    ) -> None:
        me = weakref.ref(self)  # the guard function is mine: no cycle through it
        self.is_dead = False

        def settle() -> bool:
            entry = me()
            return entry is not None and entry._settle()

        def on_death(_: object) -> None:
            entry = me()
            if entry is not None:
                entry.close()

        self._causes: dict[tuple[bool, int], Cause] = {}
        self._plan: Plan | None = build_plan(trace, torch_state, settle, self._causes, on_death)
        self._runtime = compile_graph(trace)
        self._on_retired = on_retired
        self.hits = 0
        self.last_used = 0
        completion = trace.completion
        assert completion is not None
        self.name = trace.name
        self._outputs = trace.outputs
        self._effects = completion.effects.steps
        self._binding = trace.binding
        self._namespaces = trace.namespaces
        self._uses_roots = completion.uses_roots
        self._expressions = _compile_locals(completion.expressions)
        self._fixed = (
            {
                name: value
                for name, value in completion.bound.items()
                if name not in completion.expressions
            }
            if completion.uses_roots
            else {}
        )
        self._has_contexts = trace.has_contexts
        self._held = self._plan.held
        self._positions = self._plan.fetched
        self._leading = self._positions == tuple(range(len(self._positions)))
        self._direct = (
            self._outputs.index if type(self._outputs) is TensorPlan and not self._effects else None
        )
        self.admits = self._plan.guards.admits
        self.probe = self._plan.probe
        for index in self._plan.suspects:
            cause = self._plan.dicts[index].find_cause(NOBODY)
            if cause is not None:
                self._causes[True, index] = cause
        if self._causes:  # until the value comes back that the run found
            self._held.release()
        # What was watched may have been written while the back end compiled.
        self._settle()

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Why the entry is retired; empty while it is in use."""
        return tuple(self._causes.values())

    @property
    def source(self) -> str:
        """The guard function's text."""
        return "" if self._plan is None else self._plan.guards.source

    def find_failures(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Why this entry isn't for a call."""
        if self._causes:
            return [str(cause) for cause in self._causes.values()]
        if self._plan is None:
            return ["an object that it read is gone"]
        return self._plan.guards.find_failures(args, kwargs)

    # --- validity ---

    def _settle(self) -> bool:
        """Look at what was touched. Whether everything is as it was traced."""
        plan = self._plan
        if plan is None:
            return False
        retired = bool(self._causes)
        touches = plan.sentry.take()
        owners = {touch.index: touch for touch in touches if not touch.is_dict}
        for touch in touches:
            if touch.is_dict:
                wire = plan.dicts[touch.index]
                owner = None if wire.owner is None else owners.get(wire.owner)
                cause = wire.find_cause(Writers(touch, owner))
            else:
                cause = plan.objects[touch.index].find_cause(Writers(touch))
            key = (touch.is_dict, touch.index)
            if cause is None:
                self._causes.pop(key, None)
            elif key not in self._causes:
                self._causes[key] = cause
        if self._causes and not retired:
            self._held.release()
            self._on_retired(self, next(iter(self._causes.values())))
        elif retired and not self._causes:
            if not self._held.restore():
                self.close()
        return not self._causes and not self.is_dead

    def close(self) -> None:
        """Let go of everything: never to be used again. May come in the midst of a call."""
        self.is_dead = True
        self._held.drop()
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.sentry.close()
            self.admits = _admit_nothing

    # --- running ---

    def inputs(self, fetched: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The graph's inputs: those that came with the call, and state."""
        if self._leading:
            return fetched + self._held.tensors
        inputs: list[Any] = []
        state, new = iter(self._held.tensors), iter(fetched)
        positions = set(self._positions)
        for index in range(len(self._held.tensors) + len(fetched)):
            inputs.append(next(new) if index in positions else next(state))
        return tuple(inputs)

    def run(
        self, inputs: tuple[torch.Tensor, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the compiled code; build the result, and repeat the effects."""
        runtime = self._runtime
        if self._has_contexts:
            with restoring_contexts():
                tensors = runtime(*inputs)
        else:
            tensors = runtime(*inputs)
        if self._direct is not None:
            return tensors[self._direct]
        roots = _NO_ROOTS
        if self._uses_roots:
            bound = self._fixed | self._expressions(args, kwargs)
            roots = self._binding.roots(bound, self._namespaces)
        building = Building(tensors, roots, {})
        for step in self._effects:  # before the result, which may hold what they make
            step.apply(building)
        return self._outputs.build(building)


def _admit_nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The guard function of an entry that is dead."""


def _compile_locals(expressions: dict[str, str]) -> Callable[..., dict[str, object]]:
    spelled = ", ".join(f"{name!r}: {expression}" for name, expression in expressions.items())
    function: Callable[..., dict[str, object]] = eval(f"lambda args, kwargs: {{{spelled}}}")
    return function
