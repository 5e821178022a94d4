"""A training for tests of `autopar launch`: python training.py FOLDER STEPS mesh|stages. It resumes from what it has saved.

Each step's loss goes to FOLDER/losses with the attempt and the number of devices.
"""

import os
import pickle
import signal
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
SAVED, EVERY = FOLDER / "state.pkl", 3


def whole(path, content):
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.replace(path)


def main():
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    devices, is_first = jax.device_count(), jax.process_index() == 0
    sizes = (
        {"mesh_shape": (devices,)}
        if WAY == "mesh"
        else {"mesh_shape": [(devices // 2,)] * 2, "num_microbatches": 2, "schedule": "1f1b"}
    )
    step = autopar.parallelize(train_step, **sizes)
    done, saved = pickle.loads(SAVED.read_bytes()) if SAVED.exists() else (0, init_state())
    step.plan(jax.eval_shape(lambda: saved), batch(0))
    state = step.init_state(lambda saved: saved, saved)
    for number in range(done, STEPS):
        state, loss = step(state, batch(number))
        if is_first:
            with (FOLDER / "losses").open("a") as file:
                file.write(f"{os.environ['AUTOPAR_ATTEMPT']} {devices} {number} {float(loss):.9g}\n")
        time.sleep(float(os.environ.get("TRAINING_PAUSE_S", "0")))
        if (number + 1) % EVERY == 0 or number + 1 == STEPS:
            kept = jax.tree.map(np.asarray, step.gather(state))
            if is_first:
                whole(SAVED, pickle.dumps((number + 1, kept)))


main()
