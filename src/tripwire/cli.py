"""The command line: `tripwire` and its commands.

Exit codes: 0 done; 1 a replay differs, or something is wrong (audit, doctor); 2 bad input or bad
usage. `tripwire run` exits as the script does, and with 2 where there is nothing to run.
"""

from __future__ import annotations

import os
import pdb
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from tripwire.errors import CannotReplay, TripwireError
from tripwire.recording.format.manifest import Outcome, escape, printable


class _Commands(click.Group):
    """Errors of tripwire's own are a line, not a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `tripwire doctor | head`: click ends quietly
            raise
        except (TripwireError, OSError) as error:
            raise _Trouble(_in_a_line(error)) from None


def _in_a_line(error: Exception) -> str:
    """What an error says. Names of files are in it, which others may have chosen for a terminal."""
    said = str(error)
    if isinstance(error, OSError) and error.strerror:
        place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        advice = ". Choose another path" if isinstance(error, _BAD_PATHS) else ""
        said = f"{place}{error.strerror}{advice}."
    return printable(" ".join(said.split()))


_BAD_PATHS = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


def _tell_paths(*paths: Path) -> None:
    """Print paths: as they are for programs, and on a terminal without control characters."""
    is_shown = sys.stdout.isatty()
    for path in paths:
        click.echo(printable(str(path)) if is_shown else path)


class _Trouble(click.ClickException):
    exit_code = 2


@click.group(cls=_Commands)
@click.version_option(package_name="tripwire")
def main() -> None:
    """Run scripts with tripwire, read its logs, and show and replay recorded calls."""


_file = click.argument("file", type=click.Path(exists=True, dir_okay=False))
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@main.command()
@_file
@_json
@click.option("--source", is_flag=True, help="Print the recorded source as well.")
def show(file: str, as_json: bool, source: bool) -> None:
    """Show what is in a record. This runs none of its code."""
    from tripwire.recording.capture.record import load_record
    from tripwire.recording.replay.show import print_record

    record = load_record(file)
    if as_json:
        click.echo(msgspec.json.encode(record.manifest))
    else:
        print_record(record, source)


@main.command()
@_file
@click.option("--trust", is_flag=True, help="Allow the record's code to run.")
@click.option(
    "--sandbox", is_flag=True, help="No network, none of your files, writes to a temporary folder."
)
@click.option("--pdb", "debug", is_flag=True, help="Open the debugger where the call raises.")
@click.option("--backend", help='Compile with this back end; "none" runs plain Python.')
@_json
def replay(
    file: str, trust: bool, sandbox: bool, debug: bool, backend: str | None, as_json: bool
) -> None:
    """Run a recorded call again. It needs --trust, since it runs the record's code.

    It exits with 0 if the call ends as it was recorded, also if that is with an exception; with 1
    if it ends differently; with 2 if it can't run. Of a record that doesn't say how the call ended:
    with 0 if the call returns, and with 1 if it raises.
    """
    from tripwire.recording.replay.rerun import check_trust, rebuilding
    from tripwire.recording.replay.sandbox import run_sandboxed

    check_trust(trust)
    if debug and as_json:
        raise _Trouble("--pdb talks to you, and --json to a program: leave one out.")
    if sandbox:
        if debug:
            raise _Trouble("--pdb needs a terminal, and --sandbox has none: leave one out.")
        chosen = [] if backend is None else ["--backend", backend]
        sys.exit(run_sandboxed(file, [*chosen, *(["--json"] if as_json else [])]))
    with rebuilding(file) as call:
        sys.exit(_run(call.prepare(backend), call, debug, as_json))


def _run(run: Callable[[], Any], call: Any, debug: bool, as_json: bool) -> int:
    from tripwire.recording.capture.outcomes import (
        describe_error,
        describe_result,
        is_same,
        tell_outcome,
        tell_redacted,
    )
    from tripwire.recording.format.manifest import Unknown

    raised: BaseException | None = None
    outcome: Outcome
    try:
        result = run()
    except BaseException as error:
        raised, outcome = error, describe_error(error, call.target)
        is_other = not is_same(call.manifest.outcome, outcome)
        if is_other and (isinstance(error, CannotReplay) or not isinstance(error, Exception)):
            raise  # an interrupt of now, not the one that was recorded
    else:  # trouble with describing it isn't the call's
        outcome = describe_result(result)
    known = not isinstance(call.manifest.outcome, Unknown)  # a record made by hand says nothing
    same = is_same(call.manifest.outcome, outcome) if known else None
    if as_json:
        told = {"outcome": outcome, "reproduces": same, "redacted": len(call.manifest.redacted)}
        click.echo(msgspec.json.encode(told))
    elif raised is not None:
        click.echo(escape("".join(_format(raised))), nl=False)
    if not as_json:
        click.echo(f"recorded: {tell_outcome(call.manifest.outcome)}")
        click.echo(f"replayed: {tell_outcome(outcome)}")
        if same is not None:
            click.echo("It reproduces." if same else "It differs.")
        if call.manifest.redacted:
            click.echo(f"{tell_redacted(call.manifest.redacted)}.")
    if raised is not None and debug:
        pdb.post_mortem(raised.__traceback__)
    return 0 if same or (same is None and raised is None) else 1


def _format(error: BaseException) -> list[str]:
    """What Python prints of an exception, without the frames of tripwire's that led to the call."""
    from tripwire.recording.capture.outcomes import find_users_part

    shown = find_users_part(error.__traceback__)
    if shown is None and not isinstance(error, TripwireError):  # one of tripwire's own
        shown = error.__traceback__
    return traceback.format_exception(type(error), error, shown)


@main.command()
@_file
@_json
def repro(file: str, as_json: bool) -> None:
    """Print a recorded call as a script. The script holds all values that the call needs."""
    from tripwire.recording.replay.show import write_repro

    script, why = write_repro(file)
    if why:
        click.echo(f"The script needs tripwire, because {why}.", err=True)
    told = msgspec.json.encode({"script": script, "needs_tripwire": why}) if as_json else script
    click.echo(told, nl=as_json)


_log = click.argument("log", type=click.Path(exists=True))
_output = click.option("-o", "--output", type=click.Path(), help="The path to write to.")


@main.command()
@_log
@click.option(
    "--diff", "other", type=click.Path(exists=True), help="An earlier run to compare with."
)
@_output
@_json
def report(log: str, other: str | None, output: str | None, as_json: bool) -> None:
    """Make one HTML page from a log.

    LOG is the folder that TRIPWIRE_LOG_DIR named, or `tripwire run` wrote, or one .jsonl file in
    it. The page is report.html in that folder, unless -o names another path.
    """
    from tripwire.report import build_report, compare, write_report
    from tripwire.report.page import stream_json

    _check_no_folder(output)
    built, details = _reading(log, as_json, build_report)
    if other is not None:
        build = partial(build_report, beside=details)
        built.diff = compare((built, details), _reading(other, as_json, build))
    path = write_report(built, details, output or _beside(log, "report.html"))
    if as_json:
        skipped = msgspec.to_builtins(built.skipped)
        figures = {
            "path": str(path),
            "bytes": path.stat().st_size,
            "files": skipped.pop("files"),
            "events": skipped.pop("events"),
            "processes": len(built.processes),
            "compiles": len(built.compiles),
            **built.sum_hits(),
            "retirements": built.retirements.total,
            "refusals": built.refusals.total,
            "recompiles": built.recompiles.total,
            "records": len(built.records),
            "skipped": skipped,
        }
        click.echo(msgspec.json.encode(figures)[:-1] + b',"diff":', nl=False)
        for piece in stream_json(built.diff):
            click.echo(piece, nl=False)
        click.echo("}")
    else:
        _tell_paths(path)


@main.command()
@_log
@_output
@click.option(
    "--format",
    "kind",
    type=click.Choice(["perfetto", "speedscope", "torch"]),
    default="perfetto",
    show_default=True,
    help="The viewer; torch writes a directory for tlparse.",
)
@_json
def trace(log: str, output: str | None, kind: str, as_json: bool) -> None:
    """Export a log as a timeline for another viewer.

    LOG is the folder that TRIPWIRE_LOG_DIR named, or `tripwire run` wrote, or one .jsonl file in
    it.
    """
    from tripwire.telemetry import write_chrome_trace, write_speedscope, write_torch_trace
    from tripwire.telemetry.reader import check_has_events

    check_has_events(log)
    if kind != "torch":
        _check_no_folder(output)
    paths: list[Path]
    if kind == "perfetto":
        paths = [write_chrome_trace(log, output or _beside(log, "trace.json"))]
    elif kind == "speedscope":
        paths = [write_speedscope(log, output or _beside(log, "speedscope.json"))]
    else:
        paths = write_torch_trace(log, output or _beside(log, "torch_trace"))
    if as_json:
        click.echo(msgspec.json.encode({"paths": [str(path) for path in paths]}))
    else:
        _tell_paths(*paths)


def _check_no_folder(output: str | None) -> None:
    if output is not None and os.path.isdir(output):
        raise _Trouble(f"-o: {printable(output)} is a folder. Name a file in it.")


def _beside(log: str, name: str) -> Path:
    """In the log's directory; beside it where the log is one file."""
    path = Path(log)
    return (path if path.is_dir() else path.parent) / name


def _reading(log: str, quiet: bool, build: Callable[..., Any]) -> Any:
    """Build something of a log, with a bar on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from tripwire.telemetry import LogReader

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        return build(log)
    size = LogReader(log).measure()
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # No thread draws it: at the interpreter's exit none can be started.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("reading", total=size)
        return build(log, lambda done: bar.update(task, completed=done, refresh=True))


# What follows the script is the script's.
_running = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_replaces = click.option(
    "--compile", "replaces", is_flag=True, help="Use tripwire.compile in place of torch.compile."
)
_as_module = click.option(
    "-m", "as_module", is_flag=True, help="Run a module by its name, as python -m does."
)
_script = click.argument("script")
_arguments = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)


def _check_script(script: str, as_module: bool) -> None:
    if not script:
        raise _Trouble("The script's name is empty.")
    is_there = not as_module and os.path.exists(script)
    if script.startswith("-") and not is_there:
        raise click.NoSuchOption(script, ctx=click.get_current_context())
    if not as_module and not is_there:
        raise _Trouble(f"{printable(script)}: there is no such file.")


@main.command(context_settings=_running)
@_replaces
@_as_module
@click.option(
    "--dir", "folder", type=click.Path(file_okay=False), help="A folder for log and report."
)
@click.option("--no-report", is_flag=True, help="Write the log, but no report.")
@_json
@_script
@_arguments
def run(
    replaces: bool,
    as_module: bool,
    folder: str | None,
    no_report: bool,
    as_json: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run a script with telemetry on, and write a report.

    The log and the report are in the folder tripwire-run-PID, unless --dir names another.
    """
    from tripwire.api import replacing_torch_compile
    from tripwire.running import after_threads, logging_into, run_script

    _check_script(script, as_module)
    target = Path(folder or f"tripwire-run-{os.getpid()}").absolute()
    named = os.environ.get("TRIPWIRE_LOG_DIR")
    if named and Path(named).absolute() != target:
        shown = printable(f"tripwire: the log is in {target}, not in TRIPWIRE_LOG_DIR ({named})")
        click.echo(shown, err=True)
    process, before = os.getpid(), threading.enumerate()
    with ExitStack() as stack:
        if not target.exists():
            stack.push(partial(_remove_unused, target))
        stack.enter_context(logging_into(target))
        if replaces:
            stack.enter_context(replacing_torch_compile())
        code = run_script(script, arguments, as_module)
        running = stack.pop_all()

    def finish() -> None:
        running.close()
        if os.getpid() == process:  # in a child that was forked, the report is its parent's
            _tell_of(target, code, as_json, no_report)

    after_threads(before, finish)
    sys.exit(code)


def _remove_unused(folder: Path, kind: object, error: object, trace: object) -> None:
    """Take a new folder away where there was nothing to run."""
    if isinstance(error, TripwireError):
        shutil.rmtree(folder, ignore_errors=True)


def _tell_of(folder: Path, code: int, as_json: bool, no_report: bool) -> None:
    page, trouble = (None, None) if no_report else _report_of(folder, as_json)
    if as_json:
        told = {"exit": code, "log": str(folder), "report": page, "trouble": trouble}
        click.echo(msgspec.json.encode(told))
    elif trouble is not None:
        click.echo(f"tripwire: there is no report: {trouble}", err=True)
    else:
        click.echo(f"tripwire: {printable(str(page or folder))}", err=True)


def _report_of(folder: Path, quiet: bool) -> tuple[str | None, str | None]:
    """The page's path, or why there is none: the exit code stays the script's."""
    from tripwire.report import build_report, write_report

    try:
        built, details = _reading(str(folder), quiet, build_report)
        return str(write_report(built, details, folder / "report.html")), None
    except (TripwireError, OSError) as error:
        return None, _in_a_line(error)


@main.command(context_settings=_running)
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="Time per callable.")
@click.option("--places", type=click.IntRange(min=1), help="Writes per callable.")
@click.option("--seed", type=int, help="Seed of the sample, where not all places fit the budget.")
@click.option("--gradients", is_flag=True, help="Compare gradients as well.")
@click.option("--every", is_flag=True, help="List every place that was tried.")
@_replaces
@_as_module
@_json
@_script
@_arguments
def audit(
    seconds: float | None,
    places: int | None,
    seed: int | None,
    gradients: bool,
    every: bool,
    replaces: bool,
    as_module: bool,
    as_json: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run a script, then test its compiled calls for stale results.

    The last call of each compiled callable is tested. The audit writes to each place that the call
    could read, one at a time, and compares the compiled answer with the plain one. It exits with 1
    if an answer is stale or wrong.
    """
    from rich.console import Console

    from tripwire.api import replacing_torch_compile
    from tripwire.auditing.judge import Auditor
    from tripwire.running import Calls, run_script

    _check_script(script, as_module)
    calls = Calls()
    with ExitStack() as stack:
        stack.enter_context(calls.noting())
        if replaces:
            stack.enter_context(replacing_torch_compile())
        code = run_script(script, arguments, as_module)
    if code:
        raise _Trouble(f"{script} exited with {code}, so nothing was audited.")
    if not calls.last():
        raise _Trouble(
            f"{script} called nothing that tripwire compiled. If it uses "
            "torch.compile, pass --compile."
        )
    audits = []
    for compiled, args, kwargs in calls.last():
        auditor = Auditor(seconds, places, seed, gradients)
        audits.append(auditor.audit(compiled, *args, **kwargs))
    console = Console()
    for done in audits if not as_json else ():
        done.print_to(console, every=every)
    if as_json:
        click.echo(msgspec.json.encode([done.as_data() for done in audits]))
    sys.exit(0 if all(done.ok for done in audits) else 1)


@main.command()
@_json
def doctor(as_json: bool) -> None:
    """Check this machine: versions, C modules, how tripwire watches."""
    from tripwire.doctor import examine

    findings = examine()
    if as_json:
        click.echo(msgspec.json.encode(findings))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mark = {True: "+", False: "!", None: " "}[finding.good]
            advice = f"  ({finding.advice})" if finding.advice else ""
            click.echo(printable(f"{mark} {finding.name:{width}}  {finding.found}{advice}"))
    sys.exit(1 if any(finding.good is False for finding in findings) else 0)
