"""One worker: it runs the user's script, sends beats while it lives, and says why it ends if it fails.

`python -m autopar.launch.worker SCRIPT ARGS` or `... -m MODULE ARGS`, as `supervisor.py` starts it. The script finds what it
would find if Python ran it alone: its own arguments, its folder first on the path, and the module `__main__`.

What can go wrong: an extension that holds Python's lock for long also delays the beats. A job with such an extension needs a
longer `--silence-seconds`.
"""

from __future__ import annotations

import ctypes
import io
import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType

from autopar.launch.attend import attending
from autopar.launch.environment import PIPE, SUPERVISOR
from autopar.launch.line import Line

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Run the script, and attend it."""
    end_with_supervisor()
    line = Line(int(os.environ.pop(PIPE)), f"runs {' '.join(argv[:2]) if argv[0] == '-m' else argv[0]}")
    threading.Thread(target=line.beat, name="autopar heartbeat", daemon=True).start()
    try:
        with attending(line):
            run(argv)
    except SystemExit as end:
        if end.code not in (None, 0):
            line.say("failed", f"it called sys.exit({end.code!r})")
        raise
    except BaseException as error:
        line.say("failed", describe(error))
        raise


def end_with_supervisor() -> None:
    """Let the kernel kill this process when its supervisor ends. Without Linux the next beat notices the end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ[SUPERVISOR]):  # the supervisor has ended already
            os.kill(os.getpid(), signal.SIGKILL)


def run(argv: list[str]) -> None:
    """Run `SCRIPT ARGS` or `-m MODULE ARGS` as Python would."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(argv[0]).resolve().parent)
    with io.open_code(argv[0]) as file:
        code = compile(file.read(), argv[0], "exec")
    script = ModuleType("__main__")
    script.__dict__.update(__file__=argv[0], __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = script
    exec(code, script.__dict__)


def describe(error: BaseException) -> str:
    """Describe an error: its kind, its first lines, and the line of the script or its packages that raised it."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        place, trace = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}", trace.tb_next
    lines = " ".join(str(error).strip().splitlines()[:2])
    return f"{type(error).__name__}: {lines} ({place})"


if __name__ == "__main__":
    main(sys.argv[1:])
