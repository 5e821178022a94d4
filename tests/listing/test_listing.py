"""The program as text lists the collectives that run, under the modules that ask for them, and the modules' texts have names."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest

import autopar
from tests.verify.steps import arguments, step_in

MOVE = re.compile(r">> v\d+: (\w+)\[([\d,]*)\] .* = (?P<kind>[\w-]+) over (?P<axes>[\w ]+?)(?: \(\w+\))? of ")


def collectives_listed(text):
    """How often each kind of collective over some axes stands in a text."""
    found = [MOVE.search(line) for line in text.splitlines() if line.lstrip().startswith(">>")]
    return collections.Counter((one["kind"], tuple(one["axes"].split(" and "))) for one in found)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", ["data parallel", "zero3", "stages"])
def test_the_collectives_listed_are_those_of_the_plan(mode):
    step = step_in(mode)
    text, plan = step.program(*arguments()), step.last_plan()
    plans = [plan] if mode != "stages" else [stage.plan for stage in plan.stages]
    planned = collections.Counter((one.kind, one.axes) for each in plans for one in each.collectives)
    assert collectives_listed(text) == planned
    assert planned


def test_lines_have_local_shapes_layouts_modules_and_places():
    text = step_in("zero3").program(*arguments())
    lines = text.splitlines()
    assert lines[0] == "train_step on mesh x=8, 8 devices"
    assert "  state/0/kernel: float32[4,32] [x, -]" in lines
    assert "  # layer" in lines
    assert "  # layer, backward" in lines
    (product,) = [line for line in lines if "dot_general(batch/x" in line]
    assert re.search(
        r"v\d+: float32\[2,32\] \[x, -\] = dot_general\(batch/x, v\d+\) +tests/verify/steps\.py:\d+$", product
    )
    assert [line for line in lines if line.startswith("  output/0/0/kernel: float32[4,32] [x, -] is v")]


def test_stages_have_tasks_that_hand_each_other_arrays():
    text = step_in("stages").program(*arguments())
    assert "stage 1: mesh x=2, 2 devices, 2 to 3" in text
    assert "  task forward 0, 4 times a step" in text
    assert re.search(r"task update 1\.\d, once a step", text)
    made = re.findall(r"gives (<v\d+ of forward 0>)", text)
    assert made
    assert f"takes {made[0]}" in text


def test_loops_are_indented_with_what_goes_around_and_branches_have_numbers():
    def fun(weights, batch):
        def layer(x, w):
            return jnp.tanh(x @ w), x.sum()

        x, sums = jax.lax.scan(layer, batch, weights)
        x = jax.lax.while_loop(lambda x: x.sum() > 1e9, lambda x: x * 2, x)
        return jax.lax.cond(sums[0] > 0, lambda x: x + 1, lambda x: x - 1, x).sum()

    given = jnp.ones((3, 8, 8)), jnp.ones((8, 8))
    lines = autopar.parallelize(fun, mesh_shape=(2,)).program(*given).splitlines()
    scan = next(number for number, line in enumerate(lines) if line.startswith("  scan, 3 times:"))
    assert lines[scan + 1].startswith("       v")
    assert {"    body:", "    condition:", "    branch 0:", "    branch 1:"} <= set(lines)
    words = {line.split()[0] for line in lines if line.startswith("     ")}
    assert {"next", "row", "again"} <= words


def test_modules_have_the_names_of_tasks():
    texts = step_in("stages").hlo(*arguments())
    assert {"forward 0", "forward 1", "update 0.0"} <= set(texts)
    assert all(text.startswith("HloModule") for text in texts.values())
    assert "// forward 1\nHloModule" in str(texts)
    given = step_in("zero3").hlo(*arguments(), optimized=False)
    assert list(given) == ["train_step"]
    assert "stablehlo" in given["train_step"]
