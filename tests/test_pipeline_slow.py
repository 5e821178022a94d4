"""Whole models in pipelines of every kind equal `jax.jit`: a sample of models x stages x microbatches x schedules x layouts."""

import itertools
import random

import jax
import pytest

import autopar
from autopar.models.registry import build
from tests import zoo
from tests.oracles import assert_same_as_jit

SMALL = {"hidden": 32, "heads": 4, "seq": 8, "batch": 16, "sgd": True}
WIDE = {"gpt": 4, "gpt_scan": 4, "bert": 4, "t5": 2, "moe": 2, "llama": 4}
MORE = {"t5": {"target_seq": 8}, "moe": {"experts": 4, "group": 16}, "llama": {"ffn": 64}}
UNET = {"image_size": 8, "base_channels": 8, "batch": 16, "sgd": True}
SAMPLES_PER_MODEL = 4
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)]
LAYOUTS = {
    "one device": lambda stages: {"mesh_shape": (1,)},
    "data parallel": lambda stages: {"mesh_shape": (8 // stages,), "constraints": autopar.data_parallel()},
    "weights split": lambda stages: {"mesh_shape": (2,), "constraints": {"state/params/*": autopar.Split()}},
    "planned": lambda stages: {"mesh_shape": "auto"},
    "mixed": lambda stages: {"mesh_shape": [(1, 2), (1, 2), (1, 4)]},
}


def from_zoo(name):
    """A small model with a batch of eight."""
    return getattr(zoo, f"build_{name}")()


def from_registry(name):
    """A model of the registry, small, with its own dropout, clipping and metrics."""
    sizes = UNET if name == "unet" else SMALL | {"layers": WIDE[name]} | MORE.get(name, {})
    model = build(name, **sizes)
    return model.train_step, model.create_state(jax.random.key(0)), next(model.data(0))


MODELS = {f"zoo {name}": (from_zoo, name) for name in ("gpt", "bert", "t5", "moe", "unet")}
MODELS |= {name: (from_registry, name) for name in ("gpt", "gpt_scan", "bert", "t5", "moe", "unet", "llama")}


def sampled():
    """A few settings for each model, the same in every run."""
    settings = [
        (stages, microbatches, schedule, virtual, layout)
        for stages, microbatches, (schedule, virtual), layout in itertools.product(
            (2, 4), (1, 4, 8), SCHEDULES, LAYOUTS
        )
        if schedule != "interleaved" or microbatches % stages == 0
        if layout != "mixed" or schedule != "interleaved"
    ]
    draw = random.Random(0)
    return [(name, *setting) for name in MODELS for setting in draw.sample(settings, SAMPLES_PER_MODEL)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages", "microbatches", "schedule", "virtual", "layout"), sampled())
def test_a_model_in_a_pipeline_computes_what_jit_computes(name, stages, microbatches, schedule, virtual, layout):
    make, which = MODELS[name]
    step, state, batch = make(which)
    parallel = autopar.parallelize(
        step,
        num_stages=3 if layout == "mixed" else stages,
        num_microbatches=microbatches,
        schedule=schedule,
        virtual_stages=virtual,
        **LAYOUTS[layout](stages),
    )
    assert_same_as_jit(step, parallel, state, batch)
