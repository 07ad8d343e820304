"""The peak memory of a process. Scripts that tests run in new processes import it."""

from pathlib import Path


def peak() -> int:
    """The most resident memory that this process has had, in bytes.

    `resource.getrusage` would also count the memory of the process that started this one (Linux keeps the maximum over exec).
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
