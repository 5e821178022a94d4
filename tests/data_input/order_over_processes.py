"""A training whose losses are its examples: `python -m tests.data_input.order_over_processes FOLDER RANK COUNT PORT STEPS END`.

For each of `KINDS` of a source it goes on from FOLDER/KIND, and writes `step loss` to FOLDER/KIND.losses. Behind step END, if
that is not 0, the run ends without a save, and the numbers of the examples that the process read are in FOLDER/KIND.read.RANK.
"""

import contextlib
import io
import itertools
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import autopar
from autopar.data import sharded

EXAMPLES, ROWS, SEED, EVERY = 32, 4, 3, 2
KINDS = ("by number", "generator")


def create_state():
    """How many steps there were, and how many examples."""
    return {"steps": jnp.int32(0), "examples": jnp.int32(0)}


def train_step(state, batch):
    """A loss whose digits, to the base of the number of examples, are the batch in its order; float32 holds it exactly."""
    counted = {"steps": state["steps"] + 1, "examples": state["examples"] + len(batch)}
    return counted, jnp.sum(batch * EXAMPLES ** jnp.arange(ROWS, dtype=jnp.float32))


def batch_of(loss):
    """The numbers of the examples that make up a loss."""
    return [int(loss) // EXAMPLES**place % EXAMPLES for place in range(ROWS)]


class Numbered:
    """Examples that are their own numbers, and which of them were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, number):
        self.read.append(number)
        return np.float32(number)


def drawn():
    """Whole batches without end, in a generator."""
    for epoch in itertools.count():
        order = np.random.default_rng((SEED, epoch)).permutation(EXAMPLES).astype(np.float32)
        yield from order.reshape(-1, ROWS)


def train(folder, kind, step, steps, end):
    """A run of one kind of source, which ends behind step `end` if that is not 0."""
    examples = Numbered()
    more = {"batch_size": ROWS, "shuffle_seed": SEED, "epochs": None} if kind == "by number" else {}
    data = sharded(examples if more else drawn, step, **more)

    def note(made):
        if jax.process_index() == 0:
            with (folder / f"{kind}.losses").open("a") as file:
                file.write(f"{made.number} {made.loss:.0f}\n")
        if end and made.number == end:
            (folder / f"{kind}.read.{jax.process_index()}").write_text(repr(examples.read))
            raise KeyboardInterrupt

    run = autopar.Run(
        step,
        data,
        folder / kind,
        create_state=create_state,
        every=EVERY,
        wait_for_saves=True,
        on_step=note,
        console=Console(file=io.StringIO()),
    )
    with contextlib.suppress(KeyboardInterrupt):
        run.train(steps)
    data.close()


def main():
    """See the module's text."""
    folder = Path(sys.argv[1])
    rank, count, port, steps, end = map(int, sys.argv[2:])
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=rank)
    step = autopar.parallelize(train_step, constraints=autopar.data_parallel())
    step.plan(create_state(), np.zeros(ROWS, np.float32))
    for kind in KINDS:
        train(folder, kind, step, steps, end)
    if end:
        os._exit(0)  # without a word to the other processes


if __name__ == "__main__":
    main()
