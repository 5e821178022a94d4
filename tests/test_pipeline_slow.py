"""Whole models in pipelines of every kind equal `jax.jit`: a sample of models x stages x microbatches x schedules x layouts."""

import itertools
import random

import jax
import pytest

import autopar
from autopar.models.registry import build
from tests import zoo
from tests.oracles import assert_same_as_jit
from tests.schedules.chains import TRAINING_IN_CHUNKS

SMALL = {"hidden": 32, "heads": 4, "seq": 8, "batch": 16, "sgd": True}
LAYERS = 2
MORE = {"t5": {"target_seq": 8}, "moe": {"experts": 4, "group": 16}, "llama": {"ffn": 64}}
UNET = {"image_size": 8, "base_channels": 8, "batch": 16, "sgd": True}
SAMPLES_PER_MODEL = 4
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
    sizes = UNET if name == "unet" else SMALL | {"layers": LAYERS} | MORE.get(name, {})
    model = build(name, **sizes)
    return model.train_step, jax.jit(model.create_state)(jax.random.key(0)), next(model.data(0))


MODELS = {f"zoo {name}": (from_zoo, name) for name in ("gpt", "bert", "t5", "moe", "unet")}
MODELS |= {name: (from_registry, name) for name in ("gpt", "gpt_scan", "bert", "t5", "moe", "unet", "llama")}


def is_possible(name, stages, microbatches, schedule, layout):
    """Whether the schedule and the layout are for so many microbatches of the model's batch."""
    examples = (8 if name.startswith("zoo") else 16) // microbatches
    if schedule == "interleaved" and (microbatches % stages or layout == "mixed"):
        return False
    return layout != "data parallel" or examples % (8 // stages) == 0


def sampled():
    """A few settings for each model, the same in every run; the layouts take turns."""
    draw, layouts, cases = random.Random(0), itertools.cycle(LAYOUTS), []
    for name, _ in itertools.product(MODELS, range(SAMPLES_PER_MODEL)):
        layout = next(layouts)
        settings = [
            (name, stages, microbatches, schedule, virtual, layout)
            for stages, microbatches, (schedule, virtual) in itertools.product((2, 4), (1, 4, 8), TRAINING_IN_CHUNKS)
            if is_possible(name, stages, microbatches, schedule, layout)
        ]
        cases.append(draw.choice(settings))
    return cases


def scanned():
    """Models that scan over four layers: all of GPT's settings on one device per stage, a sample of the others'."""
    draw = random.Random(1)
    settings = [
        (stages, microbatches, schedule, virtual, "one device")
        for stages, microbatches, (schedule, virtual) in itertools.product((2, 4), (1, 4), TRAINING_IN_CHUNKS)
        if is_possible("gpt", stages, microbatches, schedule, "one device")
    ]
    cases = [("gpt", {}, *setting) for setting in settings]
    cases += [("gpt", {}, 2, 4, "1f1b", 1, layout) for layout in ("data parallel", "weights split", "mixed")]
    for name, options in (("gpt", {"remat": True}), ("llama", {}), ("bert", {}), ("t5", {})):
        cases += [(name, options, *setting) for setting in draw.sample(settings, 3)]
    return cases


def in_stages(step, stages, microbatches, *, layout, **options):
    """The step as a pipeline in one of the layouts; mixed meshes are three."""
    stages_here = 3 if layout == "mixed" else stages
    return autopar.parallelize(
        step, num_stages=stages_here, num_microbatches=microbatches, **LAYOUTS[layout](stages), **options
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "stages", "microbatches", "schedule", "virtual", "layout"), scanned())
def test_a_model_whose_scan_over_layers_is_divided_computes_what_jit_computes(
    name, options, stages, microbatches, schedule, virtual, layout
):
    model = build(name, **SMALL, **MORE.get(name, {}), layers=4, scan_layers=True, **options)
    step, state, batch = model.train_step, jax.jit(model.create_state)(jax.random.key(0)), next(model.data(0))
    parallel = in_stages(step, stages, microbatches, schedule=schedule, virtual_stages=virtual, layout=layout)
    assert_same_as_jit(step, parallel, state, batch)
    assert any(parallel.last_plan().scan_cuts) or (name, stages * virtual) == ("t5", 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*of the forward work is one operation")
@pytest.mark.parametrize(("name", "stages", "microbatches", "schedule", "virtual", "layout"), sampled())
def test_a_model_in_a_pipeline_computes_what_jit_computes(name, stages, microbatches, schedule, virtual, layout):
    make, which = MODELS[name]
    step, state, batch = make(which)
    parallel = in_stages(step, stages, microbatches, schedule=schedule, virtual_stages=virtual, layout=layout)
    assert_same_as_jit(step, parallel, state, batch)
