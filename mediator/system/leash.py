"""Runs a program that dies with its parent: a script that asks the kernel for that, then becomes the program.

``python -I -S leash.py PARENT_PID [--low NICE] PROGRAM ARGUMENT…``; ``--low`` adds to its nice value and gives it one
core. A script, because the same calls between fork and exec can deadlock in a process with threads, before the fork
they would bind the service itself, and after the program's start they come too late for its threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    """Become the program on the command line, bound to the parent; exit with a line on stderr when that fails."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    # SIGKILL and not SIGTERM: it frees the port even from a program that is stopped or stuck, nats-server keeps
    # nothing on disk that a clean end would save, and nobody is left to follow up on a SIGTERM.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    # A parent that died before the call above sends no signal.
    if os.getppid() != parent:
        sys.exit("the parent is gone")
    if command[0] == "--low":
        os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + int(command[1])))
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        command = command[2:]
    # Python ignores SIGPIPE, and the program would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
