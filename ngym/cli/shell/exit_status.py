"""Ends every command with one line on standard error and an exit code, which docs/commands.md lists."""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ngym.errors import NgymError, UsageError
from ngym.extras import needed
from ngym.runtime.event_loop import ignore_interrupts

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_TRY_AGAIN, EXIT_INTERRUPTED = 0, 1, 2, 75, 130
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
DELETED = "the folder that this shell is in was deleted; cd to another one"
MISTAKES = (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)  # of the person who named the file


def exit_code(run: Callable[[], object], name: str) -> int:
    """`ended` for a process that exits with this code: after an interrupt, no further signal changes the code."""
    try:
        code = ended(run, name)
        if code != EXIT_INTERRUPTED:
            return code
    except KeyboardInterrupt:
        pass
    ignore_interrupts()
    return EXIT_INTERRUPTED


def ended(run: Callable[[], object], name: str) -> int:
    """Run a command to its end. Returns its result if that is a number, or the code of the error that ended it."""
    _make_streams_usable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = run()
        sys.stdout.flush()
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        return _say(_of_click(error, name), error.exit_code)
    except NgymError as error:
        if _lost_folder():
            return _say(DELETED, EXIT_USAGE)
        return _say(str(error), _code(error))
    except OSError as error:
        return _of_system(error, name)
    except MemoryError:
        return _say(
            f"{name}: out of memory: give it more (ulimit -v, the container's limit), or less to read", EXIT_FAILED
        )
    except ModuleNotFoundError as error:
        told = needed(error, name)
        return _say(told, EXIT_USAGE) if told else _unexpected(error, name)
    except Exception as error:  # noqa: BLE001 (every error is reported)
        return _unexpected(error, name)
    return result if isinstance(result, int) else EXIT_DONE


def _make_streams_usable() -> None:
    """Replace closed streams by the null device; standard output escapes characters that its encoding lacks."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 (until we end)
        elif name == "stdout" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _say(text: str, code: int) -> int:
    """Print an error and return its code. The text may quote untrusted text: control characters are made visible."""
    from ngym.runtime.live_region import harmless

    click.echo(harmless(text), err=True)
    return code


def _of_click(error: click.ClickException, name: str) -> str:
    """A mistake on the command line as one line."""
    text = " ".join(error.format_message().split())
    if not isinstance(error, click.UsageError):
        return text
    command = error.ctx.command_path if error.ctx else name
    if isinstance(error, click.NoSuchOption):
        near = error.possibilities
        text = f"no option {error.option_name!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
    return f"{command}: {text[:1].lower()}{text[1:].rstrip('.')}; see {command} --help"


def _code(error: NgymError) -> int:
    """The exit code of an error of ngym, which may wrap the OSError of a full disk."""
    reason = error.__context__
    if isinstance(reason, OSError) and reason.errno in DISK_FULL:
        return EXIT_TRY_AGAIN
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


def _of_system(error: OSError, name: str) -> int:
    """Report an error of the operating system. A reader that closed the pipe (`| head`) causes no message."""
    if isinstance(error, BrokenPipeError):
        _give_up_output()
        return EXIT_FAILED
    if _lost_folder():
        return _say(DELETED, EXIT_USAGE)
    reason = error.strerror or str(error)
    if error.errno in DISK_FULL:
        place = name if error.filename is None else os.fsdecode(error.filename)
        if error.filename is None and _is_output_stuck():
            _give_up_output()
            place = "standard output"
        return _say(f"{place}: {reason}; make room and run it again", EXIT_TRY_AGAIN)
    if error.filename is not None and isinstance(error, MISTAKES):
        return _say(f"{os.fsdecode(error.filename)}: {reason}", EXIT_USAGE)
    return _unexpected(error, name)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the path to an OSError of an open file, which carries no file name."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _is_output_stuck() -> bool:
    """Whether standard output cannot be written: its buffer still holds text, or (`python -u`) an empty line fails."""
    if sys.stdout is None:
        return False
    try:
        if getattr(sys.stdout, "write_through", False):
            os.write(1, b"\n")
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _give_up_output() -> None:
    """Redirect standard output to the null device: otherwise the flush at exit fails and changes the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _lost_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _unexpected(error: Exception, name: str) -> int:
    """Report a bug of ngym or a library: a log gets the whole traceback, a terminal the path of a file with it."""
    told = "".join(traceback.format_exception(error))
    where = "above"
    if sys.stderr.isatty():
        where = _kept(told, name)
    else:
        click.echo(told, err=True, nl=False)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return _say(f"{name}: unexpected {what}; if ngym is at fault, report it with the traceback ({where})", EXIT_FAILED)


def _kept(told: str, name: str) -> str:
    """Write the traceback to a temporary file and return its path, or the traceback itself if that fails."""
    try:
        handle, path = tempfile.mkstemp(prefix=f"{name.replace(' ', '_')}-", suffix=".txt")
        Path(path).write_text(told, encoding="utf-8")
        os.close(handle)
    except OSError:
        return told
    return path
