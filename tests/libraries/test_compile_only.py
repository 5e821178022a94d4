"""XLA's compiler for GPUs makes of a step what its plan says, on no GPU: `make test-gpu-compiler` installs its packages."""

import jax
import pytest

import autopar
from autopar.models import registry

pytest.importorskip("jax_plugins.xla_cuda12", reason="the compiler for GPUs is in packages of its own")
LARGE = {"hidden": 512, "heads": 8, "seq": 256, "batch": 16, "vocab": 4096}
MODELS = {
    "gpt": {"layers": 2, **LARGE},
    "llama": {"layers": 2, "ffn": 1408, **LARGE},
    "mlp": {"hidden": 2048, "inputs": 512, "batch": 4096, "layers": 4},
}


def step_for(kind, name, dtype, **options):
    model = registry.build(name, **MODELS[name], dtype=dtype)
    shapes = jax.eval_shape(model.create_state, jax.random.key(0)), model.batch_shape()
    devices = autopar.compile_only_devices(kind, 8)
    return autopar.parallelize(model.train_step, devices=devices, **options), shapes


@pytest.mark.parametrize("kind", ["v100", "a100", "h100"])
def test_a_step_is_compiled_for_gpus_as_it_is_planned(kind):
    step, shapes = step_for(kind, "gpt", "float32", num_stages=1)
    found = step.verify(*shapes)
    assert found.check() is found
    assert all(row.verdict == "matches" for row in found.rows), str(found)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt", {"num_stages": 2, "num_microbatches": 4, "mesh_shape": [(4,), (4,)]}),
        ("llama", {"constraints": autopar.zero3(), "mesh_shape": (8,)}),
        ("mlp", {"constraints": autopar.data_parallel(), "mesh_shape": (8,), "num_microbatches": 2}),
    ],
)
def test_stages_states_in_parts_and_microbatches_are_compiled_for_gpus_as_planned(name, options):
    step, shapes = step_for("a100", name, "bfloat16", **options)
    found = step.verify(*shapes)
    assert not [row for row in found.rows if row.verdict == "differs"], str(found)
    for peak in (row for row in found.rows if row.what == "peak"):
        assert 0.9 * peak.compiled <= peak.planned <= 1.15 * peak.compiled
