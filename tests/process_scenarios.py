"""What one of several processes does in tests/test_processes.py: `python -m tests.process_scenarios NAME RANK COUNT PORT FOLDER`.

Each scenario returns numbers by name, which are written to FOLDER; the test compares them with those of one process.
"""

import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.compat import make_mesh
from autopar.errors import AutoparError, PipelineError, PlanError
from autopar.split_array import SplitArray

ROWS, WIDTH, STEPS = 16, 16, 3
LATE_S = 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def init_state(seed):
    """Four layers and the optimizer's moments."""
    keys = jax.random.split(jax.random.key(seed), 4)
    params = [{"w": jax.random.normal(key, (WIDTH, WIDTH)) / 4, "b": jnp.zeros(WIDTH)} for key in keys]
    return {"params": params, "opt": OPTIMIZER.init(params)}


def batch(number):
    """The same numbers in every process."""
    draw = np.random.default_rng(number)
    return {name: draw.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in ("x", "y")}


def step(state, batch):
    """A regression step; returns the state, the loss and a metric for each example."""

    def loss_fn(params):
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        errors = ((x - batch["y"]) ** 2).sum(-1)
        return errors.mean(), errors

    (loss, errors), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    updates, opt = OPTIMIZER.update(gradients, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss, errors


def flat(tree):
    """Leaves by path, as numpy arrays."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def expected():
    """The numbers of one process under `jax.jit`."""
    state, run, found = init_state(0), jax.jit(step), {}
    for n in range(STEPS):
        state, loss, errors = run(state, batch(n))
        found |= {f"loss{n}": np.asarray(loss), f"errors{n}": np.asarray(errors)}
    return found | flat(state)


def trained(parallel, make_batch=batch):
    """Three steps: the losses as each process reads them, the last state as it is gathered."""
    found = {}
    parallel.plan(jax.eval_shape(init_state, 0), make_batch(0))
    state = parallel.init_state(init_state, 0)
    for n in range(STEPS):
        state, loss, errors = parallel(state, make_batch(n))
        found |= {f"loss{n}": np.float32(float(loss)), f"errors{n}": np.asarray(parallel.gather(errors))}
    return found | flat(parallel.gather(state))


def one_mesh():
    """All devices of both processes are one mesh; layouts are found, and some are given."""
    return trained(autopar.parallelize(step, mesh_shape=(2, 4), constraints={"state/params/0/w": P("x", "y")}))


def one_mesh_global_batch():
    """The batch is an array over all devices, in another layout than the step's, and it is cut into microbatches."""
    mesh = make_mesh(np.array(jax.devices()).reshape(8), ("rows",))

    def spread(number):
        sharding = NamedSharding(mesh, P("rows"))
        return {
            name: jax.make_array_from_callback(x.shape, sharding, lambda index, x=x: x[index])
            for name, x in batch(number).items()
        }

    return trained(autopar.parallelize(step, mesh_shape=(8,), num_microbatches=2), spread)


def stage_each():
    """Each process has one stage; meshes and layouts of the two differ."""
    constraints = {"state/params/0/w": P("x", "y"), "state/params/3/w": P(None, "x")}
    return trained(
        autopar.parallelize(
            step, mesh_shape=[(2, 2), (4,)], num_microbatches=4, constraints=constraints, schedule="1f1b"
        )
    )


def interleaved_devices():
    """Each of two stages has devices of both processes."""
    devices = [device for pair in zip(jax.devices()[:4], jax.devices()[4:], strict=True) for device in pair]
    return trained(
        autopar.parallelize(step, devices=devices, mesh_shape=[(4,), (2, 2)], num_microbatches=4, schedule="gpipe")
    )


def four_stages():
    """Each process has two stages."""
    return trained(autopar.parallelize(step, mesh_shape=(2,), num_stages=4, num_microbatches=4, schedule="zb-h1"))


def callers_arrays():
    """The state comes as arrays on one device of each process, and stays the caller's, although steps donate it."""
    options = [{"mesh_shape": (8,)}, {"mesh_shape": [(4,), (2, 2)], "num_stages": 2, "num_microbatches": 2}]
    found = {}
    for n, chosen in enumerate(options):
        state = jax.device_put(init_state(0), jax.local_devices()[1])
        before = jax.tree.map(np.array, state)
        parallel = autopar.parallelize(step, **chosen)
        last = parallel(state, batch(0))[0]
        found |= {f"{n}{path}": x for path, x in flat(parallel.gather(last)).items()}
        jax.tree.map(np.testing.assert_array_equal, state, before)
    return found


def one_device_each():
    """Each process has a single device, on which XLA runs programs in the thread that calls them."""
    return trained(autopar.parallelize(step, mesh_shape=(1,), num_stages=2, num_microbatches=4, schedule="1f1b"))


def evaluation():
    """A step that follows a pipeline and takes its state."""
    parallel = autopar.parallelize(step, mesh_shape=[(4,), (2, 2)], num_microbatches=2)
    parallel.plan(jax.eval_shape(init_state, 0), batch(0))
    state = parallel.init_state(init_state, 0)
    loss = autopar.parallelize(lambda state, batch: step(state, batch)[1], follow=parallel)(state, batch(0))
    return {"loss0": np.asarray(loss)}


def init_stack(seed):
    """Four layers in one stack, and a key for dropout."""
    key = jax.random.key(seed)
    return {"w": jax.random.normal(key, (4, WIDTH, WIDTH)) / 4, "key": jax.random.fold_in(key, 1)}


def stack_step(state, batch):
    """The layers under a scan, with dropout."""
    key, mask_key = jax.random.split(state["key"])

    def loss_fn(w):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        kept = jax.random.bernoulli(mask_key, 0.8, batch["x"].shape)
        x, _ = jax.lax.scan(layer, jnp.where(kept, batch["x"], 0), w)
        return ((x - batch["y"]) ** 2).mean()

    loss, gradient = jax.value_and_grad(loss_fn)(state["w"])
    return {"w": state["w"] - 0.5 * gradient, "key": key}, loss


def stack_expected():
    """The numbers of one process under `jax.jit`."""
    state, run, found = init_stack(0), jax.jit(stack_step), {}
    for n in range(STEPS + 1):
        state, loss = run(state, batch(n))
        found[f"loss{n}"] = np.asarray(loss)
    return found | {"w": np.asarray(state["w"]), "key": np.asarray(jax.random.key_data(state["key"]))}


def stack_in_two_processes():
    """A stack divided between stages of both processes; a step on one mesh before, and a restart from gathered arrays.

    The first state comes as each process's own copy, whose key has to be spread too, and is made on the devices.
    """
    shapes, found = jax.eval_shape(init_stack, 0), {}
    whole = autopar.parallelize(stack_step, mesh_shape=(2, 4))
    staged = autopar.parallelize(stack_step, mesh_shape=[(4,), (4,)], num_stages=2, num_microbatches=2)
    whole.plan(shapes, batch(0))
    _, of_own_copy = whole(init_stack(0), batch(0))
    state, loss = whole(whole.init_state(init_stack, 0), batch(0))
    found["loss0"] = np.asarray(loss)
    assert found["loss0"] == np.asarray(of_own_copy)
    state, loss = staged(state, batch(1))
    found["loss1"] = np.asarray(loss)
    state, loss = staged(state, batch(2))
    found["loss2"] = np.asarray(loss)
    assert isinstance(state["w"], SplitArray)
    saved = staged.gather(state)
    assert {len(leaf.devices()) for leaf in jax.tree.leaves(saved)} == {1}
    state = staged.init_state(lambda saved: saved, saved)
    state, loss = staged(state, batch(3))
    found["loss3"] = np.asarray(loss)
    last = staged.gather(state)
    return found | {"w": np.asarray(last["w"]), "key": np.asarray(jax.random.key_data(last["key"]))}


def rate_step(state, batch):
    """Gradient descent in bfloat16 with a rate and a number of steps that began as Python numbers."""
    loss, gradients = jax.value_and_grad(
        lambda params: ((jnp.tanh(jnp.tanh(batch["x"] @ params[0]) @ params[1]) - batch["y"]) ** 2).mean()
    )(state["params"])
    params = [p - state["rate"] * g for p, g in zip(state["params"], gradients, strict=True)]
    return {"params": params, "rate": state["rate"] * 0.5, "steps": state["steps"] + 1}, loss


def weak_rate():
    """Two stages in two processes: one of them holds the rate. What types come back, and how often each plans."""
    parallel = autopar.parallelize(rate_step, mesh_shape=[(4,), (4,)], num_stages=2, num_microbatches=2)
    state = {"params": [np.eye(WIDTH, dtype=jnp.bfloat16)] * 2, "rate": 0.5, "steps": 0}
    types = []
    for n in range(2):
        state, _ = parallel(state, {name: x.astype(jnp.bfloat16) for name, x in batch(n).items()})
        types.append([(str(x.dtype), x.weak_type) for x in jax.tree.leaves(state)])
    return {"types": str(types), "plans": len(parallel._memory.programs)}


def caught(kind, run):
    """The words of the exception that `run` has to raise."""
    try:
        run()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def plans_that_differ():
    """The processes ask for plans of different batches and under different constraints; later, for one that no memory holds."""
    shapes = jax.eval_shape(init_state, 0)
    rows = {name: x[: 8 + 8 * jax.process_index()] for name, x in batch(0).items()}
    parallel = autopar.parallelize(step, mesh_shape=(8,))
    differ = caught(PlanError, lambda: parallel.plan(shapes, rows))
    constraints = (autopar.data_parallel(), autopar.zero3())[jax.process_index()]
    bound = autopar.parallelize(step, mesh_shape=(8,), constraints=constraints)
    constrained = caught(PlanError, lambda: bound.plan(shapes, batch(0)))
    small = autopar.parallelize(step, mesh_shape=(8,), memory_limit_bytes=100)
    return {
        "differ": differ,
        "constrained": constrained,
        "memory": caught(AutoparError, lambda: small.plan(shapes, batch(0))),
    }


def odd_one_out():
    """The last process does something else than the others, once with each kind of call; in between all do the same."""
    devices, processes = jax.device_count(), jax.process_count()
    sizes = [(devices // processes,)] * processes
    on_mesh = differ_and_go_on(autopar.parallelize(step, mesh_shape=(devices,)))
    in_stages = differ_and_go_on(autopar.parallelize(step, mesh_shape=sizes, num_microbatches=2))
    return {f"mesh {k}": v for k, v in on_mesh.items()} | {f"stages {k}": v for k, v in in_stages.items()}


def differ_and_go_on(parallel):
    """What is told by one step; see `odd_one_out`."""
    is_odd, found = jax.process_index() == jax.process_count() - 1, {}
    shapes, half = jax.eval_shape(init_state, 0), {name: x[: ROWS // 2] for name, x in batch(0).items()}
    parallel.plan(shapes, batch(0))
    state, _, _ = parallel(parallel.init_state(init_state, 0), batch(0))
    for kind, differs in {
        "batch": lambda: parallel(state, half),
        "plan": lambda: parallel.plan(shapes, half),
        "gather": lambda: parallel.gather(state),
    }.items():
        found[kind] = caught(PlanError, differs if is_odd else lambda: parallel(state, batch(0)))
    last, loss, _ = parallel(state, batch(1))
    gone = caught(AutoparError, lambda: parallel(state if is_odd else last, batch(1)))
    return found | {"loss": np.float32(float(loss)), "gone": gone}


def ends_between_steps():
    """The process that the environment names ends with an error outside of a step; what the other is told."""
    parallel = autopar.parallelize(step, mesh_shape=(2,))
    state, _, _ = parallel(init_state(0), batch(0))
    if jax.process_index() == int(os.environ["AUTOPAR_TEST_ENDS"]):
        raise RuntimeError("no more data")
    began = time.monotonic()
    words = caught(PlanError, lambda: parallel(state, batch(1)))
    Path(sys.argv[5], "words.txt").write_text(words)
    return {"waited_s": time.monotonic() - began}


def in_trouble(happens):
    """A pipeline of which process 1, the second stage, gets into trouble in its second step; what each process is told."""
    parallel = autopar.parallelize(step, mesh_shape=[(4,), (4,)], num_microbatches=2, schedule="gpipe")
    compiled = parallel.compile(jax.eval_shape(init_state, 0), batch(0))
    state = parallel.init_state(init_state, 0)
    state, _, _ = parallel(state, batch(0))
    if jax.process_index() == 1:
        callables = compiled._driver._performer.executables
        real = callables["backward 1"]
        callables["backward 1"] = lambda groups: happens() or real(groups)
    began = time.monotonic()
    first = caught(PipelineError, lambda: parallel(state, batch(1)))
    found = {"first": first, "again": caught(PipelineError, lambda: parallel(state, batch(1)))}
    return found | {"waited_s": time.monotonic() - began}


def broken():
    """A failure between two launches."""
    raise ValueError("broken on purpose")


def stage_that_fails():
    """The second stage raises; the first waits for what it would have sent."""
    return in_trouble(broken)


class TakesLongToGo:
    """The interpreter ends slowly with this: other threads may run meanwhile, such as one that another process frees."""

    def __init__(self, seconds, sleep=time.sleep):
        self.seconds, self.sleep = seconds, sleep

    def __del__(self):
        self.sleep(self.seconds)


def stage_that_fails_and_ends_late():
    """As `stage_that_fails`, on a busy machine: the second process takes seconds to end, and so does the first."""
    found = stage_that_fails()
    seconds = LATE_S if jax.process_index() == 1 else 2 * LATE_S
    sys.modules[__name__].__dict__["goes"] = TakesLongToGo(seconds)
    return found


def process_that_dies():
    """The process of the second stage ends without a word."""
    return in_trouble(lambda: os._exit(3))


def recorded():
    """What each process records of one mesh, and of stages that have devices of both: places, times, words."""
    devices = [device for pair in zip(jax.devices()[:4], jax.devices()[4:], strict=True) for device in pair]
    ways = {
        "one mesh": {"mesh_shape": (8,)},
        "stages": {"devices": devices, "mesh_shape": [(4,), (2, 2)], "num_microbatches": 2, "schedule": "gpipe"},
    }
    found = {}
    for name, way in ways.items():
        parallel = autopar.parallelize(step, **way)
        parallel.plan(jax.eval_shape(init_state, 0), batch(0))
        state = parallel.init_state(init_state, 0)
        with autopar.record(parallel) as run:
            for n in range(STEPS):
                state, *_ = parallel(state, batch(n))
        data, own = run.data, run.data.operations
        found[f"{name}: places"] = sorted({(data.mesh(one), one.device) for one in own})
        spans = {(span.name, span.microbatch): span for span in data.spans}
        held = (spans.get((one.task, one.microbatch)) for one in own)
        found[f"{name}: held"] = [
            span is None or span.start_s <= one.start_s <= one.end_s <= span.end_s
            for one, span in zip(own, held, strict=True)
        ]
        found[f"{name}: said"] = str(run)
    return found


def main(name, rank, count, port, folder):
    """Join the others, run the scenario, write its numbers."""
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        num_processes=count,
        process_id=rank,
        initialization_timeout=60,
        # On a busy machine a process may be silent for long; where one dies, the other ends when it misses its heartbeat.
        heartbeat_timeout_seconds=20 if name == "process_that_dies" else 100,
        shutdown_timeout_seconds=100,
    )
    found = globals()[name]()
    np.savez(Path(folder) / f"{rank}.npz", **found)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
