"""A report of a large log: how long it takes, and how much memory: at most 500 MB for 100 MB.

The log is of eight processes (`--processes`) with three threads each: spans most of all, as in a
long run, and every so often a compile with a graph of 600 nodes, guards, wires and reads, its
retirement, and refusals. All of its names and lines vary, so that nothing is small by luck.

Two sides, each a fresh process, in alternating rounds:

    read        every event of the log is decoded and dropped: what reading alone costs.
    report      tripwire.report: the log becomes a page.

"peak" is the whole process's peak resident set, torch and tripwire imported, from /proc (Linux
only). The report of a log a tenth as large is measured as well: what the peak grows by between
the two is what the size of the log costs. Exits with 1 above 500 MB.

    python benchmarks/bench_report.py [--megabytes N] [--processes N] [--rounds N] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from side_by_side import Figures, describe_machine, print_table, write_json

from tripwire.report import build_report, write_report
from tripwire.telemetry import CompilationMetrics, read_events
from tripwire.telemetry.schema import (
    MAJOR,
    MINOR,
    CompileFinished,
    CompileStarted,
    Event,
    GraphCaptured,
    GraphNode,
    GuardsBuilt,
    Header,
    ReadRow,
    ReadsSeen,
    Retired,
    RunRefused,
    SpanDone,
    WiresArmed,
    encode,
)

LIMIT = 500e6  # bytes
READ, REPORT = SIDES = ("read", "report")
SPANS_PER_COMPILE = 2_000
NODES, ROWS = 600, 200


# --- the log -----------------------------------------------------------------------------------


def write_log(directory: Path, megabytes: float, processes: int) -> int:
    """Write the files of a log of about that size; returns its bytes."""
    directory.mkdir()
    written = 0
    for number in range(processes):
        header = Header(
            major=MAJOR,
            minor=MINOR,
            host="bench",
            pid=1000 + number,
            parent_pid=1,
            token=f"{number:x}",
            start_wall_ns=1_760_000_000_000_000_000,
            start_monotonic_ns=0,
            python="3",
            ranks={"RANK": str(number)},
        )
        share = megabytes * 1e6 / processes
        with (directory / f"tripwire-bench-{header.pid}-{header.token}.jsonl").open("wb") as file:
            file.write(encode(header))
            turn = 0
            while file.tell() < share:
                file.writelines(map(encode, make_stretch(number, turn)))
                turn += 1
            written += file.tell()
    return written


def make_stretch(process: int, turn: int) -> list[Event]:
    """A stretch of a run: one compile, what retires it, and the steps after it."""
    begin = turn * 10_000_000_000
    ids = {"thread": 1, "compile_id": f"{turn % 40}/{turn}"}
    file, function = f"/home/user/model_{turn % 7}.py", f"Layer{turn % 40}.forward"
    rows = tuple(
        ReadRow(
            source=f"L['self'].layers[{n}].weight_{turn}", seen=f"<Tensor {n}>", file=file, line=n
        )
        for n in range(ROWS)
    )
    metrics = CompilationMetrics(
        co_name=function,
        duration_us=900_000 + turn,
        trace_us=200_000,
        backend_us=690_000,
        unattributed_us=10_000 + turn,
        has_guarded_code=True,
    )
    events: list[Event] = [
        CompileStarted(time_ns=begin, function=function, file=file, line=turn, **ids),
        GraphCaptured(time_ns=begin + 1, nodes=make_nodes(file, turn), **ids),
        GuardsBuilt(time_ns=begin + 2, source=f"def admits(x):\n    return {turn}\n" * 50, **ids),
        WiresArmed(time_ns=begin + 3, wires=rows, **ids),
        ReadsSeen(time_ns=begin + 4, reads=rows, **ids),
        SpanDone(time_ns=begin, duration_ns=900_000_000, name=f"compile {function}", **ids),
        CompileFinished(time_ns=begin + 900_000_000, metrics=metrics, **ids),
    ]
    for n in range(20):
        source, line = f"G['config_{turn % 900}'].value_{n}", turn * 20 + n
        events.append(
            Retired(time_ns=begin + n, source=source, old="1", new="2", file=file, line=n)
        )
        events.append(RunRefused(time_ns=begin + n, slug="hidden-state", reason="r", line=line))
    for n in range(SPANS_PER_COMPILE):
        events.append(
            SpanDone(
                time_ns=begin + 1_000_000_000 + n * 4_000_000,
                thread=1 + n % 3,
                name=f"step {n % 300}",
                duration_ns=1_000_000 + (n * 7919 + turn * 104_729 + process) % 2_000_000,
                depth=n // 3 % 2,
                data={"step": n, "loss": n / 7},
            )
        )
    return events


def make_nodes(file: str, turn: int) -> tuple[GraphNode, ...]:
    """A graph in scopes, with lines and carets."""
    text = "        x = x + self.attn(self.norm(x)) * self.config.scale"
    return tuple(
        GraphNode(
            name=f"add_{n}",
            op="call_function",
            target="torch.nn.functional.linear",
            inputs=(f"add_{n - 1}", f"add_{n // 2}") if n else (),
            scope=f"blocks.{n // 20}.part{n % 4}",
            file=file,
            line=turn + n % 50,
            function="Block.forward",
            text=text.strip(),
            shape="float32[8, 256, 384]",
            excerpt=f"{text}\n{'~' * len(text)}\n",
        )
        for n in range(NODES)
    )


# --- one measurement: a process of its own ---------------------------------------------------


def measure_once(side: str, log: Path, target: Path) -> dict[str, float]:
    """Seconds, the peak of the whole process, and what came out."""
    start = time.perf_counter()
    if side == READ:
        found = {"events": float(sum(1 for _ in read_events(log)))}
    else:
        report, details = build_report(log)
        page = write_report(report, details, target)
        found = {
            "events": float(report.skipped.events),
            "page": float(page.stat().st_size),
            "compiles": float(len(report.compiles)),
            "spans kept": float(sum(len(lane.spans) for lane in report.lanes)),
            "details left out": float(report.skipped.details),
        }
    return {"s": time.perf_counter() - start, "peak": peak_bytes(), **found}


def peak_bytes() -> float:
    """The process's largest resident set so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == "VmHWM":
            return float(value.split()[0]) * 1024
    raise LookupError("VmHWM")


def measure_in_process(side: str, log: Path, target: Path) -> dict[str, float]:
    """`measure_once` in a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", side]
    done = subprocess.run(
        [*command, str(log), str(target)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{side}: exit status {done.returncode}\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Read the options, write the logs, measure, print, judge, and write the figures."""
    parser = argparse.ArgumentParser(description="time and memory of a report of a large log.")
    parser.add_argument("--megabytes", type=float, default=100, help="size of the log")
    parser.add_argument("--processes", type=int, default=8, help="files of the log")
    parser.add_argument("--rounds", type=int, default=3, help="processes a side")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        side, log, target = options.measure
        print(json.dumps(measure_once(side, Path(log), Path(target))))
        return

    with tempfile.TemporaryDirectory() as base:
        large, small, page = Path(base, "large"), Path(base, "small"), Path(base, "report.html")
        size = write_log(large, options.megabytes, options.processes)
        write_log(small, options.megabytes / 10, options.processes)
        print(f"{describe_machine()}; {options.rounds} alternating rounds, medians")
        print(f"a log of {size / 1e6:.1f} MB, {options.processes} processes")
        times = {side: Figures(side) for side in SIDES}
        tenth = "report, a tenth of the log"
        peaks = {side: Figures(side) for side in (*SIDES, tenth)}
        for _ in range(options.rounds):
            for side in SIDES:
                found = measure_in_process(side, large, page)
                times[side].values.append(found["s"])
                peaks[side].values.append(found["peak"])
            peaks[tenth].values.append(measure_in_process(REPORT, small, page)["peak"])
    print_table("time", list(times.values()), READ, unit="s", scale=1)
    print_table("peak of the process", list(peaks.values()), READ, unit="MB", scale=1e-6)
    outcome = {name: value for name, value in found.items() if name not in ("s", "peak")}
    print("  " + ", ".join(f"{name}: {value:,.0f}" for name, value in outcome.items()))
    worst = max(peaks[REPORT].values)
    holds = worst <= LIMIT
    print(f"  at most {LIMIT / 1e6:.0f} MB: {'yes' if holds else 'NO'}, {worst / 1e6:.0f} MB")
    if options.json is not None:
        settings = {"bytes": size, "processes": options.processes, "rounds": options.rounds}
        figures = {
            "time": {"unit": "s", "sides": list(times.values())},
            "peak": {"unit": "B", "sides": list(peaks.values())},
        }
        write_json(options.json, "bench_report", {**settings, **outcome}, figures)
    if not holds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
