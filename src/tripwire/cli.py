"""The command line. Exit codes: 0 done, 1 the replayed call raised, 2 bad input or bad usage."""

from __future__ import annotations

import pdb
import sys
import traceback
from collections.abc import Callable
from typing import Any

import click
import msgspec

from tripwire.errors import TripwireError
from tripwire.recording.format import Outcome


class _Group(click.Group):
    """Errors of tripwire's own are a line, not a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (TripwireError, OSError) as error:
            raise _Trouble(" ".join(str(error).split())) from None


class _Trouble(click.ClickException):
    exit_code = 2


@click.group(cls=_Group)
@click.version_option(package_name="tripwire")
def main() -> None:
    """Tools around tripwire's records."""


_file = click.argument("file", type=click.Path(exists=True, dir_okay=False))
_json = click.option("--json", "as_json", is_flag=True, help="Print data for programs.")


@main.command()
@_file
@_json
@click.option("--source", is_flag=True, help="Print the recorded source as well.")
def show(file: str, as_json: bool, source: bool) -> None:
    """Show what is in a record. Nothing of it runs."""
    from tripwire.recording.record import load
    from tripwire.recording.showing import print_record

    record = load(file)
    if as_json:
        click.echo(msgspec.json.encode(record.manifest))
    else:
        print_record(record, source)


@main.command()
@_file
@click.option("--trust", is_flag=True, help="Run the code that is in the record.")
@click.option("--pdb", "debug", is_flag=True, help="Open the debugger where it raises.")
@click.option("--backend", help='Compile with another back end; "none" runs it plainly.')
@_json
def replay(file: str, trust: bool, debug: bool, backend: str | None, as_json: bool) -> None:
    """Run a record's call again."""
    from tripwire.recording.rerun import check_trust, rebuilding

    check_trust(trust)
    with rebuilding(file) as call:
        sys.exit(_run(call.prepare(backend), call, debug, as_json))


def _run(run: Callable[[], Any], call: Any, debug: bool, as_json: bool) -> int:
    from tripwire.recording.outcomes import describe_error, describe_result, explain, is_same

    raised: Exception | None = None
    outcome: Outcome
    try:
        outcome = describe_result(run())
    except Exception as error:
        raised, outcome = error, describe_error(error, call.target)
    same = is_same(call.manifest.outcome, outcome)
    if as_json:
        click.echo(msgspec.json.encode({"outcome": outcome, "reproduces": same}))
    elif raised is not None:
        click.echo("".join(traceback.format_exception(raised)), nl=False)
    if not as_json:
        click.echo(f"recorded: {explain(call.manifest.outcome)}")
        click.echo(f"replayed: {explain(outcome)}")
        click.echo("It reproduces." if same else "It differs.")
    if raised is not None and debug:
        pdb.post_mortem(raised.__traceback__)
    return 0 if raised is None else 1


@main.command()
@_file
def repro(file: str) -> None:
    """Print a script that makes the call again, with everything in it."""
    from tripwire.recording.repro import write_repro

    click.echo(write_repro(file), nl=False)
