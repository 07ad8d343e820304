"""The command line, `secateur`.

- `commands`: the commands and their options. It imports no torch, so that `--help` and completion are quick.
- `running`: exit codes, errors as one line, JSON or text.
- `actions`: what each command does. `models` and `batches` open what the user named. `demo` is the example without files.
"""

from .commands import main

__all__ = ["main"]
