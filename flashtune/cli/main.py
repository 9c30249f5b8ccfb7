"""The `flashtune` command: a group of thin commands that report errors alike."""

import atexit
import difflib
import errno
import importlib
import os
import sys
import threading
from typing import Any, NoReturn

import click

import flashtune
from flashtune.cli.interrupts import INTERRUPTED, Interrupts, interruptible
from flashtune.core.system.errors import EnvironmentProblem, FlashtuneError
from flashtune.core.system.secrets import mask_secrets

COMMANDS = {
    "search": "Find the fastest kernel for your shapes and store it.",
    "model": "Tune the attention of one model, and show what the model gains.",
    "show": "List the best records.",
    "explain": "Say what would run a call, and why.",
    "bench": "Time tuned kernels against PyTorch's backends on this GPU.",
    "referee": "Check who is right and how fast: flashtune, PyTorch, other libraries.",
    "profile": "Show where attention's time and bytes go.",
    "verify": "Check records for correctness on this machine, or time them again.",
    "generate": "Render the winners of a database to source files.",
    "export": "Write a compact database to ship with a model.",
    "merge": "Merge databases into one that holds the best records of every key.",
    "doctor": "Check this machine for everything that flashtune needs.",
}
"""Commands and their lines in `flashtune --help`; each is in the module of its name in flashtune.cli."""


def _leave(status: int) -> NoReturn:
    """End this process as Python would, but without unloading imported modules, which takes up to a second after a search."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            # As Python does where its buffers can't be written.
            status = status or 120
    os._exit(status)


def _say(ctx: click.Context, error: FlashtuneError, *, interrupted: bool = False) -> NoReturn:
    from flashtune.cli.console import one_line

    said = one_line(mask_secrets(str(error)))
    click.echo(f"flashtune: interrupted ({said})" if interrupted else f"flashtune: {said}", err=True)
    ctx.exit(INTERRUPTED if interrupted else error.exit_code)


def _say_if_triton_is_missing(ctx: click.Context) -> None:
    from flashtune.tuner.machine import require_triton

    try:
        require_triton()
    except FlashtuneError as missing:
        _say(ctx, missing)


def _others_running() -> bool:
    """True if Python would wait for another thread before it ends."""
    return any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


class LazyGroup(click.Group):
    """Group that imports a command's module only when it is used, so that `flashtune --help` is fast."""

    _ending = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Command names in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command object, or None for a name that doesn't exist."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"flashtune.cli.{cmd_name}"), cmd_name)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """The typed command; an unknown name fails with the nearest known one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            ctx.fail(f"no such command {args[0]!r}: " + (f"did you mean {near[0]}?" if near else f"use one of {', '.join(COMMANDS)}"))
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Rest of the words behind options of flashtune itself; a usage error is printed as a command's is."""
        some = bool(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if not some:
                # Without words the error is the help text.
                raise
            _report(error, ctx)
            ctx.exit(error.exit_code)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def __call__(self, *words: Any, **settings: Any) -> Any:
        """Run as the command of this process, and end it."""
        self._ending = True
        try:
            return super().__call__(*words, **settings)
        except SystemExit as end:
            if isinstance(end.code, int | None) and not _others_running():
                _leave(end.code or 0)
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; its FlashtuneErrors become one line and an exit code."""
        if sys.stdout is None:
            # Closed by the parent (`>&-`): without this, output would go into the next file that is opened, such as a database.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        interrupts = Interrupts(ending=self._ending)
        with interruptible(interrupts):
            return self._invoke(ctx, interrupts)

    def _invoke(self, ctx: click.Context, interrupts: Interrupts) -> Any:
        try:
            _require_folder()
            found = super().invoke(ctx)
            sys.stdout.flush()
            return found
        except KeyboardInterrupt:
            click.echo("flashtune: interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except FlashtuneError as error:
            # Interrupted code may raise errors of its own, and failures to save results should be shown.
            _say(ctx, error, interrupted=interrupts.came)
        except click.UsageError as error:
            _report(error, ctx)
            ctx.exit(error.exit_code)
        except BrokenPipeError:
            # The reader (head, less) has gone: nobody would see a message.
            sys.stderr.close()
            ctx.exit(0)
        except OSError as error:
            if error.filename is not None:
                _say(ctx, EnvironmentProblem(f"{error.filename} can't be read or written ({error.strerror}): name another path"))
            if error.errno != errno.ENOSPC:
                raise
            click.echo(f"flashtune: the output can't be written ({error.strerror}): free some space there", err=True)
            # The buffer can't be written: without this the interpreter would complain at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(4)
        except Exception as error:
            if not interrupts.came:
                if isinstance(error, ImportError):
                    _say_if_triton_is_missing(ctx)
                raise
            click.echo("flashtune: interrupted", err=True)
            ctx.exit(INTERRUPTED)


def _require_folder() -> None:
    """Raise EnvironmentProblem where the working directory was removed: relative paths can't be resolved there."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise EnvironmentProblem("the working directory of this command was removed: change to an existing one") from error


def _report(error: click.UsageError, ctx: click.Context) -> None:
    """Print a usage error in one line, with the command for more help."""
    help_line = " ".join(["flashtune", *([ctx.invoked_subcommand] if ctx.invoked_subcommand else []), "--help"])
    from flashtune.cli.console import one_line

    click.echo(f"flashtune: {one_line(mask_secrets(error.format_message()))} (see {help_line})", err=True)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(flashtune.__version__, prog_name="flashtune")
def main() -> None:
    """Find the fastest attention kernel for your GPU and your shapes, and ship that knowledge.

    \b
    flashtune search --gpu-name h200 --d 128     tune this GPU (or predict for another)
    flashtune show                               list known records
    flashtune explain --n 4096 --d 128           say what would run a call, and why

    Exit codes: 0 done, 1 a check failed (such as verify), 2 bad input, 3 a database can't be used,
    4 this machine lacks something, 5 no correct kernel was found, 130 interrupted.
    """
    # Calls of this process and its children are no model's.
    os.environ.pop("FLASHTUNE_CALLS", None)


if __name__ == "__main__":
    main()
