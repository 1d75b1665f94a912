"""`ng`, the group of all commands, with its own `help` and `completion`; and what all share: one-line errors, options.

Every command ends with an exit code, which docs/commands.md lists; an error is one line on standard error.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import get_completion_class

from ngym import __version__
from ngym.cli.shell.completion_names import overrides
from ngym.errors import NgymError, UsageError
from ngym.extras import missing_extra
from ngym.runtime.event_loop import EXIT_INTERRUPTED, exit_process, ignore_interrupts

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_TRY_AGAIN = 0, 1, 2, 75
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
DELETED = "the folder that this shell is in was deleted; cd to another one"
MISTAKES = (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)  # of the person who named the file


def exit_code(run: Callable[[], object], name: str) -> int:
    """`run_command` for a process that exits with this code: after an interrupt, no further signal changes the code."""
    try:
        code = run_command(run, name)
        if code != EXIT_INTERRUPTED:
            return code
    except KeyboardInterrupt:
        pass
    ignore_interrupts()
    return EXIT_INTERRUPTED


def run_command(run: Callable[[], object], name: str) -> int:
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
        return _say(_usage_line(error, name), error.exit_code)
    except NgymError as error:
        if _is_folder_missing():
            return _say(DELETED, EXIT_USAGE)
        return _say(str(error), _code(error))
    except OSError as error:
        return _of_system(error, name)
    except MemoryError:
        return _say(
            f"{name}: out of memory: give it more (ulimit -v, the container's limit), or less to read", EXIT_FAILED
        )
    except ModuleNotFoundError as error:
        message = missing_extra(error, name)
        return _say(message, EXIT_USAGE) if message else _report_bug(error, name)
    except Exception as error:  # noqa: BLE001 (every error is reported)
        return _report_bug(error, name)
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
    from ngym.runtime.live_region import sanitize

    click.echo(sanitize(text), err=True)
    return code


def _usage_line(error: click.ClickException, name: str) -> str:
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
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, OSError) and reason.errno in DISK_FULL:
            return EXIT_TRY_AGAIN
        reason = reason.__cause__ or reason.__context__
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


def _of_system(error: OSError, name: str) -> int:
    """Report an error of the operating system. A reader that closed the pipe (`| head`) causes no message."""
    if isinstance(error, BrokenPipeError):
        _give_up_output()
        return EXIT_FAILED
    if _is_folder_missing():
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
    return _report_bug(error, name)


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


def _is_folder_missing() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _report_bug(error: Exception, name: str) -> int:
    """Report a bug of ngym or a library: a log gets the whole traceback, a terminal the path of a file with it."""
    trace = "".join(traceback.format_exception(error))
    where = "above"
    if sys.stderr.isatty():
        where = _save_trace(trace, name)
    else:
        click.echo(trace, err=True, nl=False)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return _say(f"{name}: unexpected {what}; if ngym is at fault, report it with the traceback ({where})", EXIT_FAILED)


def _save_trace(trace: str, name: str) -> str:
    """Write the traceback to a temporary file and return its path, or the traceback itself if that fails."""
    try:
        handle, path = tempfile.mkstemp(prefix=f"{name.replace(' ', '_')}-", suffix=".txt")
        Path(path).write_text(trace, encoding="utf-8")
        os.close(handle)
    except OSError:
        return trace
    return path


Function = TypeVar("Function", bound=Callable[..., Any])

# Command -> its module and its line in `ng --help`, so that the help of one does not import the others.
COMMANDS = {
    "quickstart": ("ngym.cli.quickstart", "Make a tiny policy, score its rollouts, and train it."),
    "init": ("ngym.cli.init", "Create a folder with your own environment."),
    "list": ("ngym.cli.list", "Show every environment: domain, kind, rows, licence."),
    "prepare": ("ngym.cli.rollouts.prepare", "Download a public dataset and convert it to rows."),
    "validate": ("ngym.cli.validate", "Check a config; test its environments without a model."),
    "run": ("ngym.cli.run", "Start every service of the config and keep it running."),
    "status": ("ngym.cli.status", "Show the services of the run in this folder."),
    "serve": ("ngym.cli.serve", "Run one service of the config in this process."),
    "collect_rollouts": ("ngym.cli.rollouts.collect", "Run an agent over tasks and write scored rollouts."),
    "view": ("ngym.cli.view", "Look at rollouts and training runs in a browser."),
    "profile": ("ngym.cli.rollouts.profile", "Show which tasks are solved and which give no signal."),
    "reverify": ("ngym.cli.rollouts.reverify", "Verify stored rollouts again, without a model."),
    "export": ("ngym.cli.rollouts.export", "Convert rollouts to training files."),
    "train": ("ngym.cli.train", "Train a policy."),
    "submit": ("ngym.cli.submit", "Run a command on a cluster: Slurm, Kubernetes or SkyPilot."),
    "plot": ("ngym.cli.plot", "Draw the curves of training runs."),
    "push": ("ngym.cli.push", "Upload a policy or rollouts to the Hugging Face Hub."),
    "doctor": ("ngym.cli.doctor", "Show what of this machine and its packages works."),
}
# Commands of `ng` only, without a separate script.
OWN = {"help": "Show this help, or the help of a command.", "completion": "Print the completion script of a shell."}
GROUPS = {
    "Begin": ("quickstart", "init"),
    "Environments": ("list", "prepare", "validate"),
    "Services": ("run", "status", "serve"),
    "Rollouts": ("collect_rollouts", "view", "profile", "reverify", "export"),
    "Training": ("train", "submit", "plot", "push"),
    "The command line": ("doctor", *OWN),
}


def context_settings() -> dict[str, Any]:
    """The layout of help, and whether it has colours: NO_COLOR, TERM=dumb, FORCE_COLOR, else only on a terminal."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    color = False if plain else True if os.environ.get("FORCE_COLOR") else None
    return {"help_option_names": ["-h", "--help"], "max_content_width": 100, "color": color}


def _print_version(ctx: click.Context, _: click.Parameter, enabled: bool) -> None:
    if enabled and not ctx.resilient_parsing:
        click.echo(f"{ctx.command_path} (ngym) {__version__}")
        ctx.exit()


VERSION = click.Option(
    ["--version"],
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)


class Command(click.Command):
    """A command with --version that ends an error with one line and an exit code (ngym/cli/shell/main.py)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(VERSION)

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        run = partial(super().main, *args, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        is_process = not args and extra.get("args") is None  # not a test runner
        code = exit_code(run, self.name or "ng") if is_process else run_command(run, self.name or "ng")
        if is_process and "torch" in sys.modules:
            exit_process(code)
        sys.exit(code)


class CommandList(Command, click.Group):
    """A group that imports a command when it is used, and suggests the nearest name for a misspelled one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *OWN]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return super().get_command(ctx, name)
        command: click.Command = importlib.import_module(COMMANDS[name][0]).main
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0].removeprefix("ng_").removeprefix("ng-").replace("-", "_")
        if name not in self.list_commands(ctx) and not name.startswith("_"):
            # `colect` is nearer to `collect` than to `collect_rollouts`.
            whole = {word: known for known in self.list_commands(ctx) for word in (known.partition("_")[0], known)}
            near = get_close_matches(name, whole, n=1)
            ctx.fail(f"no command {args[0]!r}" + (f" (did you mean {whole[near[0]]!r}?)" if near else ""))
        return super().resolve_command(ctx, [name, *args[1:]])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        lines = {name: line for name, (_, line) in COMMANDS.items()} | OWN
        width = max(map(len, lines))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), lines[name]) for name in names])


class Choice(click.Choice[str]):
    """A choice of words that suggests the nearest one for a misspelled value."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        near = get_close_matches(str(value), self.choices, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return super().get_invalid_choice_message(value, ctx).rstrip(".") + hint


def command(name: str, epilog: str = "", cls: type[Command] = Command) -> Callable[[Callable[..., Any]], Command]:
    """`@command("ng_run")` instead of `@click.command`. The epilog's lines are kept as they are."""
    epilog_text = "\b\n" + epilog if epilog else None
    return click.command(name, cls=cls, epilog=epilog_text, context_settings=context_settings())


def count(name: str, help: str, default: int | None = None) -> Callable[[Function], Function]:
    """An option with a whole number, 1 or more."""
    show_default = default is not None
    return click.option(
        name, type=click.IntRange(1), default=default, show_default=show_default, metavar="N", help=help
    )


def on_option(help: str) -> Callable[[Function], Function]:
    """`--on local|ray[://HOST:PORT]`, as `on`."""

    def checked(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
        if not re.fullmatch(r"local|ray|ray://[^/\s:]+:\d+", value):
            raise click.BadParameter(f"{value!r} is not local, ray or ray://HOST:PORT", ctx, parameter)
        return value

    metavar = "local|ray[://HOST:PORT]"
    return click.option("--on", callback=checked, default="local", show_default=True, metavar=metavar, help=help)


def hub_token_option(help: str) -> Callable[[Function], Function]:
    """`--hub-token TOKEN`, as `hub_token`; white space around it is removed."""

    def checked(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        token = (value or "").strip()
        if not re.fullmatch(r"[!-~]*", token):  # the message must not have the token
            raise click.BadParameter(
                "it has spaces or characters that are not ASCII, so it is no token", ctx, parameter
            )
        return token or None

    return click.option(
        "--hub-token", callback=checked, envvar="HF_TOKEN", show_envvar=True, metavar="TOKEN", help=help
    )


def config_files(help: str, *default: str) -> Callable[[Function], Function]:
    """`--config FILE ...`, as `configs`."""
    path, show_default = click.Path(path_type=Path), bool(default)
    return click.option(
        "--config",
        "configs",
        multiple=True,
        type=path,
        default=default,
        show_default=show_default,
        metavar="FILE",
        help=help,
    )


def config_options(function: Function) -> Function:
    """Add `--config FILE ...` and `key=value ...`, the options of every command that reads the global config."""
    files = config_files("A config file; repeat it, and later files win.", "global_config.yaml")
    values = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=overrides)
    return values(files(function))


@click.command("ng", cls=CommandList, invoke_without_command=True, context_settings=context_settings())
@click.pass_context
def main(ctx: click.Context) -> None:
    """Train and evaluate language-model agents against environments that are plain HTTP services.

    `ng COMMAND` is also `ng_COMMAND` and `ngym COMMAND`. Each has --help with examples; most have --json for programs, and --dry-run.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _command_names(ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[str]:
    return [name for name in COMMANDS if name.startswith(prefix)]


@main.command("help", cls=Command, context_settings=context_settings())
@click.argument("name", required=False, metavar="[COMMAND]", shell_complete=_command_names)
@click.pass_context
def help_of(ctx: click.Context, name: str | None) -> None:
    """Show the help of a command, or of `ng` with all commands.

    \b
    Examples: ng help
              ng help run
    """
    ng = ctx.find_root()
    assert isinstance(ng.command, CommandList)
    if name is None:
        click.echo(ng.get_help())
        return
    resolved_name, command, _ = ng.command.resolve_command(ng, [name])
    assert isinstance(command, Command)
    with click.Context(command, info_name=resolved_name, parent=ng) as context:
        click.echo(context.get_help())


# Replacements in click's scripts: no space after a word that ends with `.` or `=`. fish does that by itself.
UNFINISHED = {
    "bash": {
        "COMPREPLY+=($value)\n": "COMPREPLY+=($value)\n"
        "            [[ $value == *[.=] ]] && compopt -o nospace 2>/dev/null\n"
    },
    "zsh": {
        "local -a completions\n": "local -a completions unfinished\n",
        'completions+=("$key")\n': '[[ "$key" == *[.=] ]] && unfinished+=("$key") || completions+=("$key")\n',
        "compadd -U -V unsorted -a completions\n    fi\n": "compadd -U -V unsorted -a completions\n    fi\n\n"
        "    if [ -n \"$unfinished\" ]; then\n        compadd -U -S '' -V unsorted -a unfinished\n    fi\n",
    },
    "fish": {},
}
SHELLS = tuple(UNFINISHED)


@main.command("completion", cls=Command, context_settings=context_settings())
@click.argument("shell", type=Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of a shell: commands, options, files, recipes, and the services and keys of a config.

    \b
    Examples: eval "$(ng completion bash)"       (into ~/.bashrc)
              eval "$(ng completion zsh)"        (into ~/.zshrc, after compinit)
              ng completion fish | source        (into ~/.config/fish/config.fish)
    """
    maker = get_completion_class(shell)
    assert maker is not None
    for script in ("ng", "ngym", *(f"ng_{name}" for name in COMMANDS)):
        source = maker(main, {}, script, f"_{script.upper()}_COMPLETE").source()
        for written, better in UNFINISHED[shell].items():
            source = source.replace(written, better)
        click.echo(source)
