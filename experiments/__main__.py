"""``python -m experiments`` is ``whybn``: the process around `experiments.cli.main`."""

from __future__ import annotations

import os
import signal
import sys


def entry() -> int:
    """Run the command line's command; the exit code. No Ctrl-C, however early or late, ends in a traceback."""
    try:
        from experiments.cli import main  # takes a moment, in which Ctrl-C may come

        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("whybn: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # Whoever read us has had enough (``whybn list | head``). Python would flush once more at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    if code == 130:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # we are leaving as it is
    return code


if __name__ == "__main__":
    sys.exit(entry())
