"""A command that waits where its search begins, `python -m tests.commands.terminal.held ARGUMENTS`, until its input is closed.

It says `held` on standard error then, so that a signal comes during the search however fast that is.
"""

import sys

from autopar.__main__ import main
from autopar.progress import Progress, listening


def hold(progress: Progress) -> None:
    """Wait, once."""
    if progress.phase == "planning on one mesh" and not sys.stdin.closed:
        sys.stderr.write("held\n")
        sys.stdin.read()
        sys.stdin.close()


if __name__ == "__main__":
    with listening(hold):
        sys.exit(main(sys.argv[1:]))
