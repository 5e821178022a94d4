"""Peak memory of a restore in one of several processes: `python -m tests.checkpoints.memory_of_restore FOLDER RANK COUNT PORT`.

Writes to FOLDER/memory.RANK how many bytes the process held before, at most while it restored, and how many its share is.
"""

import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import autopar

WIDTH, LAYERS = 2048, 48


def step(state, batch):
    """Weights that get smaller."""
    return [w * 0.5 for w in state], sum((batch @ w).mean() for w in state)


def resident_bytes():
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_bytes():
    """The most that it was since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main():
    """See the module's text."""
    folder, (rank, count, port) = Path(sys.argv[1]), map(int, sys.argv[2:])
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=rank)
    wide = autopar.parallelize(
        step, constraints={"state/*": jax.sharding.PartitionSpec(None, "x")}, mesh_shape=(count,)
    )
    shapes = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    batch = np.ones((4 * count, WIDTH), np.float32)
    wide.plan(shapes, batch)
    if not (folder / "saved").exists():
        tall = autopar.parallelize(
            step, constraints={"state/*": jax.sharding.PartitionSpec("x", None)}, mesh_shape=(count,)
        )
        tall.plan(shapes, batch)
        state = tall.init_state(lambda: [jnp.full((WIDTH, WIDTH), k, jnp.float32) for k in range(LAYERS)])
        autopar.save(folder / "saved", state, tall).wait()
        return
    wide.places()
    small = autopar.parallelize(step, mesh_shape=(count,))  # loads orbax and its threads
    small.plan([jax.ShapeDtypeStruct((8, 8), jnp.float32)], np.ones((4 * count, 8), np.float32))
    one = small.init_state(lambda: [jnp.ones((8, 8))])
    autopar.save(folder / "small", one, small).wait()
    autopar.restore(folder / "small", small)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes()
    state = autopar.restore(folder / "saved", wide)
    jax.block_until_ready(state)
    peak = peak_bytes()
    share = sum(shard.data.nbytes for leaf in state for shard in leaf.addressable_shards)
    assert all(float(leaf.addressable_shards[0].data[0, 0]) == k for k, leaf in enumerate(state))
    (folder / f"memory.{rank}").write_text(f"{before} {peak} {share}")


if __name__ == "__main__":
    main()
