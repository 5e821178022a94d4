"""A training for tests of `autopar launch`: python training.py FOLDER STEPS mesh|stages. It resumes from what it has saved.

Each step's loss goes to FOLDER/losses with the attempt and the number of devices, and a digest of the last state to FOLDER/end.
"""

import hashlib
import itertools
import os
import sys
import time
from pathlib import Path

import autopar.launch

autopar.launch.join()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from training_step import batch, init_state, train_step  # noqa: E402

import autopar  # noqa: E402

FOLDER, STEPS, WAY = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
EVERY = 3


def note(step):
    if jax.process_index() == 0:
        with (FOLDER / "losses").open("a") as file:
            file.write(f"{os.environ['AUTOPAR_ATTEMPT']} {jax.device_count()} {step.number - 1} {step.loss:.9g}\n")
    time.sleep(float(os.environ.get("TRAINING_PAUSE_S", "0")))


devices = jax.device_count()
sizes = {"mesh_shape": (devices,)}
if WAY == "stages":
    sizes = {"mesh_shape": [(devices // 2,)] * 2, "num_microbatches": 2, "schedule": "1f1b"}
step = autopar.parallelize(train_step, **sizes)
step.plan(jax.eval_shape(init_state), batch(0))
run = autopar.Run(
    step,
    lambda: map(batch, itertools.count()),
    FOLDER / "states",
    create_state=init_state,
    every=EVERY,
    wait_for_saves="TRAINING_WAITS" in os.environ,
    on_step=note,
)
trained = run.train(STEPS)
if trained.stopped is None:
    whole = jax.tree.map(np.asarray, step.gather(trained.state))
    digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in jax.tree.leaves(whole))).hexdigest()
    if jax.process_index() == 0:
        (FOLDER / "end").write_text(digest)
