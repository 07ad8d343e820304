"""Runs a command: prints its answer as text or JSON, turns errors into one line, and sets the exit code.

Exit codes: 0 done, 1 failed, 2 the command line is wrong, 130 interrupted (Ctrl-C).
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import click

FAILED, INTERRUPTED = 1, 130
TRACEBACK = "SECATEUR_TRACEBACK"  # environment variable: show where an error was raised


class Answer(NamedTuple):
    """What a command found or did: as text for people, and as plain data for `--json`."""

    text: str
    data: dict[str, Any]


class Failure(Exception):
    """An error whose message is complete: it is printed as it is."""


def run(work: Callable[[], Answer], as_json: bool, options: Mapping[str, str]) -> None:
    """Calls `work` and prints its answer. Ends the program with an exit code if it fails.

    `options`: the options of the program by the names of the Python arguments, for messages that name these.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            answer = work()
    except click.UsageError as error:
        raise click.UsageError(with_options(error.message, options), error.ctx) from None
    except KeyboardInterrupt:
        end("interrupted; no file is half written", as_json, INTERRUPTED)
    except Exception as error:
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        end(with_options(one_line(error), options), as_json, FAILED)
    else:
        text = with_options(answer.text, options, values=False)
        click.echo(json.dumps(answer.data, indent=1, default=str) if as_json else text)


_CALL = re.compile(r"(\w\((?:[^()]|\([^()]*\))*\))")  # such as admm(refit=10, target=flow(0.5, 0.75))


def with_options(text: str, options: Mapping[str, str], *, values: bool = True) -> str:
    """Names options in place of Python arguments: "pass data= (...)" becomes "pass --data (...)".

    With `values`, also where a value follows: "spread='x'" becomes "--spread='x'". Arguments of calls keep their names.
    """
    parts = _CALL.split(text)
    for name, option in options.items():
        for at in range(0, len(parts), 2):  # between the calls
            parts[at] = re.sub(rf"(?<![\w-]){name}=(?=[\s,;)]|$)", option, parts[at])
            if values:
                parts[at] = re.sub(rf"(?<![\w-]){name}=(?!=)", f"{option}=", parts[at])
    return "".join(parts)


_VALUES = {"data": "data= takes module:function, a folder of images or a text file"}  # where a shell takes other values


def unknown_option(error: click.NoSuchOption) -> str:
    """The message for an option that a command does not have. It names our option for one of another library."""
    from .._hints import FOREIGN

    options = {str(p.name): max(p.opts, key=len) for p in error.ctx.command.params} if error.ctx else {}
    hints = FOREIGN.get(error.option_name.lstrip("-").replace("-", "_"), ())
    hint = next((_VALUES.get(ours, text) for ours, text in hints if ours in options), None)
    return error.format_message() if hint is None else with_options(f"No such option {error.option_name}; {hint}", options)


def end(message: str, as_json: bool, code: int) -> None:
    """Ends the program with one line on standard error, and with `--json` an object on standard output."""
    if as_json:
        click.echo(json.dumps({"error": message}))
    click.echo(f"secateur: {message}", err=True)
    sys.exit(code)


def one_line(error: BaseException) -> str:
    """An error as one line that says what to do."""
    if isinstance(error, OSError) and error.errno is not None:
        text = _of_system(error)
    else:
        text = str(error) or type(error).__name__
        if not isinstance(error, Failure | ValueError | TypeError | OSError):
            text = f"{type(error).__name__}: {text}"
    notes = [note for note in getattr(error, "__notes__", ()) if note not in text]
    return " ".join("; ".join([text.removesuffix(".") if notes else text, *notes]).split())


_REASONS = {
    errno.ENOENT: "no such file or folder",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EISDIR: "this is a folder, and a file is expected",
    errno.ENOTDIR: "a part of this path is a file, and a folder is expected",
}


def _of_system(error: OSError) -> str:
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    name = re.sub(r"\.secateur-\w+\.tmp$", "", str(error.filename or ""))  # the file that is written beside this one
    return f"{name}: {reason}" if name else reason


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    click.echo(f"secateur: warning: {' '.join(str(message).split())}", err=True)
