"""Runs a command: prints its answer as text or JSON, turns errors into one line, and sets the exit code.

Exit codes: 0 done, 1 failed, 2 the command line is wrong, 130 interrupted (Ctrl-C).
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
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


def run(work: Callable[[], Answer], as_json: bool) -> None:
    """Calls `work` and prints its answer. Ends the program with an exit code if it fails."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            answer = work()
    except click.ClickException:
        raise
    except KeyboardInterrupt:
        _end("interrupted; no file is half written", as_json, INTERRUPTED)
    except Exception as error:
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        _end(one_line(error), as_json, FAILED)
    else:
        click.echo(json.dumps(answer.data, indent=1, default=str) if as_json else answer.text)


def _end(message: str, as_json: bool, code: int) -> None:
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
    return " ".join("; ".join([text, *notes]).split())


_REASONS = {
    errno.ENOENT: "no such file or folder",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EISDIR: "this is a folder, and a file is expected",
    errno.ENOTDIR: "a folder of this path is a file",
}


def _of_system(error: OSError) -> str:
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    return f"{error.filename}: {reason}" if error.filename else reason


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    click.echo(f"secateur: warning: {' '.join(str(message).split())}", err=True)
