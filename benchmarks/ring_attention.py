"""Memory of a Llama whose sequence is split over 1, 2, 4 and 8 devices, as XLA allocates it and as autopar predicts it.

In: a length and sizes. Out: per number of devices the bytes of one device beside its state, by XLA's account of the compiled step
on virtual CPU devices and by the plan, and the part of what one device alone needs. The ideal is 1 / devices. What can go wrong:
short sequences, of which the scores of one block of 512 queries and 512 keys are a large part; they are the same on every device.

    python benchmarks/ring_attention.py [--seq 65536] [--keys-and-values-alone]
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["AUTOPAR_CACHE"] = "off"

import argparse
import warnings

import jax
from jax.sharding import PartitionSpec as P

import autopar
from autopar.models import BuiltModel, build
from autopar.models.config import DTYPES


def temporaries(model: BuiltModel, devices: int) -> tuple[int, int]:
    """(XLA's, predicted) bytes of one device beside its arguments, the sequence split and only permutations for keys."""
    step = autopar.parallelize(
        model.train_step,
        mesh_shape=(devices,),
        devices=devices,
        constraints={"batch/*": P(None, "x")} if devices > 1 else {},
        collectives=("collective-permute", "all-reduce"),
        num_microbatches=1,
        recompute="none",
    )
    compiled = step.compile(jax.eval_shape(model.create_state, jax.random.key(0)), model.batch_shape())
    arguments = sum(value.bytes_per_device for value in compiled.plan.inputs)
    return compiled.memory_analysis().temp_size_in_bytes, compiled.plan.peak_bytes - arguments


def main() -> None:
    """Print a line for each number of devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=65_536)
    parser.add_argument("--keys-and-values-alone", action="store_true", help="no halves of queries travel for balance")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="that the model computes in")
    given = parser.parse_args()
    sizes = {"batch": 1, "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 256, "sgd": True}
    sizes |= {"dtype": given.dtype, "balanced_attention": not given.keys_and_values_alone}
    model = build("llama", **sizes, seq=given.seq, fused_attention=True)
    warnings.simplefilter("ignore", autopar.AutoparWarning)
    alone = None
    for devices in (1, 2, 4, 8):
        real, predicted = temporaries(model, devices)
        alone = alone or real
        share = f"{real / alone:.3f} of one device's, ideal {1 / devices:.3f}"
        print(f"{devices} devices: {real / 1e6:8.1f} MB by XLA, {predicted / 1e6:8.1f} MB predicted; {share}")


if __name__ == "__main__":
    main()
