"""A run that may be killed at any moment: `python -m tests.checkpoints.killed_run FOLDER RANK COUNT PORT`.

Says `step N` after each step. Writes to FOLDER/end.RANK, when it comes to its end, the digest of its last state, the last loss,
the number of steps that are made and the signal that stopped it.
"""

import hashlib
import io
import sys
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

import autopar
from tests.checkpoints.steps import bits, make_batch, make_state, scanned_step

STEPS, EVERY = 24, 2


def forever():
    """Batches without end, the same in every process."""
    number = 0
    while True:
        yield make_batch(number)
        number += 1


def say(made):
    """A line at once."""
    sys.stdout.write(f"step {made.number}\n")
    sys.stdout.flush()


def train(folder):
    """The run; returns what is compared."""
    step = autopar.parallelize(scanned_step, constraints=autopar.zero3())
    step.plan(jax.eval_shape(make_state), make_batch())
    run = autopar.Run(
        step, forever, folder, create_state=make_state, every=EVERY, on_step=say, console=Console(file=io.StringIO())
    )
    found = run.train(STEPS)
    held = jax.tree.map(np.asarray, {"params": step.gather(found.state["params"])})
    return hashlib.sha256(repr(sorted(bits(held).items())).encode()).hexdigest(), found


def main():
    """See the module's text."""
    folder, (rank, count, port) = Path(sys.argv[1]), map(int, sys.argv[2:])
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=rank)
    digest, found = train(folder / "run")
    loss = "-" if found.loss is None else float(found.loss).hex()
    (folder / f"end.{rank}").write_text(f"{digest} {loss} {found.number} {found.stopped}")


if __name__ == "__main__":
    main()
