"""A script for tests of `autopar launch`: workers that have joined, and then compute nothing: python joined.py FOLDER.

In the first attempt each waits for ever, once it has said that it joined; the first worker, in which JAX's coordination service
runs, waits for all of them before its moment comes.
"""

import os
import sys
import time
from pathlib import Path

import autopar.launch
from autopar.testing.faults import point

FOLDER, PAUSE_S = Path(sys.argv[1]), 0.01
RANK, ATTEMPT = int(os.environ["AUTOPAR_RANK"]), int(os.environ["AUTOPAR_ATTEMPT"])
PROCESSES = int(os.environ["AUTOPAR_PROCESSES"])


def joined():
    return len([*FOLDER.glob(f"joined.{ATTEMPT}.*")])


autopar.launch.join()
(FOLDER / f"joined.{ATTEMPT}.{RANK}").touch()
while joined() < PROCESSES:
    time.sleep(PAUSE_S)
if RANK == 0:
    point("all have joined")
while ATTEMPT == 0:
    time.sleep(PAUSE_S)
sys.stdout.write(f"ends in attempt {ATTEMPT}\n")
