"""The main job, start to end: trace a small transformer and look at what came out."""

from __future__ import annotations

import time

import torch
from transformer import Transformer

import tripwire


def main() -> None:
    """Trace, print, run on other inputs, compare with the model."""
    torch.manual_seed(0)
    model = Transformer()
    tokens = torch.randint(0, 100, (1, 8))
    model(tokens)

    start = time.perf_counter()
    trace = tripwire.trace(model, tokens)
    seconds = time.perf_counter() - start
    print(trace.format(source=True))

    other = torch.randint(0, 100, (1, 8))
    same = torch.equal(trace(other), model(other))
    tied = [wanted for wanted in trace.inputs if wanted.aliases]
    node = trace.find("mixed")
    print()
    print(f"traced in        {seconds * 1e3:.1f} ms")
    print(f"on other tokens  {'equal to the model' if same else 'DIFFERENT from the model'}")
    print(f"tied weights     {', '.join(map(str, tied))}")
    print(f"the node {node.name!r} in scope {node.scope!r} comes from")
    for frame in node.where.frames:
        print(f"    {frame}{'  (library)' if frame.library else ''}")
    if not same or not compile_and_write(model, tokens):
        raise SystemExit(1)


def compile_and_write(model: Transformer, tokens: torch.Tensor) -> bool:
    """Compile, call, write to the model, call again. Whether all results are the model's."""
    compiled = tripwire.compile(model, backend="eager")
    same = []
    print()
    for name, write in (
        ("nothing", lambda: None),
        ("nothing", lambda: None),
        ("a parameter, in place", lambda: model.head.weight.data.mul_(2)),
        ("a submodule", lambda: setattr(model, "norm", torch.nn.Identity())),
        ("nothing", lambda: None),
        ("the mode", model.eval),
    ):
        write()
        same.append(torch.equal(compiled(tokens), model(tokens)))
        done = compiled.statistics()
        print(
            f"{name} changed: {'equal' if same[-1] else 'DIFFERENT'}, "
            f"{done.traces} traces, {done.hits} hits"
        )
    for cause in compiled.statistics().causes:
        print(f"retired by {cause}")
    return all(same)


if __name__ == "__main__":
    main()
