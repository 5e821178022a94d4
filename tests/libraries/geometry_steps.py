"""Steps of libraries for graphs, differential equations, images, geometry and sampling."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.libraries.corpus import (
    BATCH,
    cross_entropy,
    integers,
    labelled,
    library_step,
    mixes_examples,
    noise,
    of_sizes,
    perceptron,
    trained,
)


def _is_a(kind, leaf):
    return isinstance(leaf, kind)


def graphs():
    """BATCH graphs of 5 nodes and 8 edges, as arrays."""
    sizes = {"n_node": jnp.full((BATCH, 1), 5, jnp.int32), "n_edge": jnp.full((BATCH, 1), 8, jnp.int32)}
    ends = {"senders": integers(5, BATCH, 8), "receivers": integers(5, BATCH, 8, seed=1)}
    return {"nodes": noise(BATCH, 5, 4), "edges": noise(BATCH, 8, 3), **ends, **sizes, "y": integers(3, BATCH)}


@library_step("jraph")
def jraph_graph_network():
    import jraph

    def loss_of(params, batch):
        def update_edge(edges, sent, received, _):
            return jnp.tanh(jnp.concatenate([edges, sent, received], -1) @ params["edge"])

        def update_node(nodes, sent, received, _):
            return jnp.tanh(jnp.concatenate([nodes, sent, received], -1) @ params["node"])

        network = jraph.GraphNetwork(update_edge_fn=update_edge, update_node_fn=update_node)

        def one(graph):
            made = network(jraph.GraphsTuple(**{k: v for k, v in graph.items() if k != "y"}, globals=None))
            return made.nodes.mean(0) @ params["out"]

        return cross_entropy(jax.vmap(one)(batch), batch["y"])

    params = {"edge": noise(11, 8, scale=0.3), "node": noise(20, 8, scale=0.3), "out": noise(8, 3, scale=0.3)}
    return trained(loss_of, params, graphs())


@library_step("jraph", refused=mixes_examples("relates examples of the batch"))
def jraph_convolutions_of_one_batched_graph():
    """All graphs are one: nodes, edges and graphs are dimensions of their own, and no leaf has the examples in front."""
    import jraph

    def loss_of(params, batch):
        graph = jraph.GraphsTuple(**{k: v for k, v in batch.items() if k != "y"}, edges=None, globals=None)
        for weights in params["layers"]:
            graph = jraph.GraphConvolution(lambda nodes, weights=weights: jax.nn.relu(nodes @ weights))(graph)
        owner = jnp.repeat(jnp.arange(8), graph.n_node, total_repeat_length=16)
        return cross_entropy(jraph.segment_mean(graph.nodes, owner, 8) @ params["out"], batch["y"])

    params = {"layers": [noise(4, 8, scale=0.4), noise(8, 8, scale=0.4)], "out": noise(8, 3, scale=0.3)}
    batch = {"nodes": noise(16, 4), "senders": integers(16, 32), "receivers": integers(16, 32, seed=1)}
    batch |= {"n_node": jnp.full(8, 2, jnp.int32), "n_edge": jnp.full(8, 4, jnp.int32), "y": integers(3, 8)}
    return trained(loss_of, params, batch)


@library_step("diffrax", "equinox", told=("the step calls Python: pure_callback",))
def diffrax_neural_differential_equation():
    import diffrax

    def loss_of(params, batch):
        term = diffrax.ODETerm(lambda t, y, args: perceptron(params, y))
        times = diffrax.SaveAt(ts=jnp.linspace(0, 1, 4))

        def one(start):
            how = {"t0": 0.0, "t1": 1.0, "dt0": 0.1, "y0": start, "saveat": times}
            return diffrax.diffeqsolve(term, diffrax.Tsit5(), **how).ys

        return jnp.mean((jax.vmap(one)(batch["start"]) - batch["y"]) ** 2)

    return trained(loss_of, of_sizes(3, 16, 3), {"start": noise(BATCH, 3), "y": noise(BATCH, 4, 3)})


@library_step(
    "optimistix",
    "equinox",
    refused=mixes_examples("needs a value that is reduced over all examples"),
    told=("the step calls Python: pure_callback",),
)
def optimistix_equilibrium_layer():
    """Its result is a fixed point, found by iteration and differentiated implicitly."""
    import optimistix

    def loss_of(params, batch):
        solver = optimistix.FixedPointIteration(rtol=1e-6, atol=1e-6)

        def one(x):
            def again(z, _):
                return jnp.tanh(z @ params["again"] + x @ params["in"])

            return optimistix.fixed_point(again, solver, jnp.zeros(6), max_steps=64, throw=False).value

        return jnp.mean((jax.vmap(one)(batch["x"]) - batch["y"]) ** 2)

    params = {"again": noise(6, 6, scale=0.1), "in": noise(4, 6, scale=0.3)}
    return trained(loss_of, params, {"x": noise(BATCH, 4), "y": noise(BATCH, 6)})


@library_step(
    "lineax",
    "equinox",
    refused=mixes_examples("needs a value that is reduced over all examples"),
    told=("the step calls Python: pure_callback",),
)
def lineax_ridge_regression_inside_a_layer():
    import lineax

    def loss_of(params, batch):
        def one(x, y, ahead, wanted):
            features = jnp.tanh(x @ params["in"])
            matrix = features.T @ features + jnp.exp(params["ridge"]) * jnp.eye(6)
            operator = lineax.MatrixLinearOperator(matrix, lineax.positive_semidefinite_tag)
            weights = lineax.linear_solve(operator, features.T @ y, solver=lineax.Cholesky()).value
            return (jnp.tanh(ahead @ params["in"]) @ weights - wanted) ** 2

        return jax.vmap(one)(batch["x"], batch["y"], batch["ahead"], batch["wanted"]).mean()

    batch = {"x": noise(BATCH, 10, 4), "y": noise(BATCH, 10), "ahead": noise(BATCH, 3, 4), "wanted": noise(BATCH, 3)}
    return trained(loss_of, {"in": noise(4, 6, scale=0.4), "ridge": jnp.float32(0)}, batch)


@library_step("dm_pix")
def dm_pix_augments_images_and_measures_similarity():
    import dm_pix

    def loss_of(params, batch):
        def augmented(key, image):
            first, second, third = jax.random.split(key, 3)
            image = dm_pix.random_flip_left_right(first, image)
            image = dm_pix.random_brightness(second, image, 0.2)
            return dm_pix.random_contrast(third, image, 0.8, 1.2)

        seen = jax.vmap(augmented)(batch["keys"], batch["x"])
        dims = ("NHWC", "HWIO", "NHWC")
        made = jax.lax.conv_general_dilated(seen, params, (1, 1), "SAME", dimension_numbers=dims)
        blurred = dm_pix.gaussian_blur(made, 1.0, 3)
        return 1 - dm_pix.ssim(blurred, batch["x"], filter_size=5).mean() + dm_pix.mse(made, batch["x"]).mean()

    images = jax.nn.sigmoid(noise(BATCH, 12, 12, 1))
    return trained(
        loss_of, noise(3, 3, 1, 1, scale=0.2), {"x": images, "keys": jax.random.split(jax.random.key(0), BATCH)}
    )


@library_step("e3nn_jax")
def e3nn_equivariant_layers():
    import e3nn_jax as e3nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, points):
            seen = e3nn.spherical_harmonics("0e + 1o + 2e", points, normalize=True)
            gated = e3nn.gate(e3nn.flax.Linear("8x0e + 4x0e + 4x1o")(seen))
            made = e3nn.flax.Linear("8x0e + 4x1o")(e3nn.tensor_product(seen, gated))
            return e3nn.flax.Linear("3x0e")(made).array

    model, batch = Model(), {"x": noise(BATCH, 3), "y": integers(3, BATCH)}
    points = lambda batch: e3nn.IrrepsArray("1o", batch["x"])  # noqa: E731
    params = model.init(jax.random.key(0), points(batch))["params"]
    return trained(
        lambda params, batch: cross_entropy(model.apply({"params": params}, points(batch)), batch["y"]), params, batch
    )


@library_step("penzai")
def penzai_perceptron():
    from penzai import pz
    from penzai.models import simple_mlp

    model = simple_mlp.MLP.from_config(
        name="mlp", init_base_rng=jax.random.key(0), feature_sizes=[8, 16, 4], activation_fn=jax.nn.relu
    )
    unbound, variables = pz.unbind_params(model, freeze=True)

    def loss_of(values, batch):
        x = pz.nx.wrap(batch["x"]).tag("batch", "features")
        logits = pz.bind_variables(unbound, values)(x).unwrap("batch", "features")
        return cross_entropy(logits, batch["y"])

    return trained(loss_of, variables, labelled(8))


@library_step("flowjax", "equinox")
def flowjax_masked_autoregressive_flow():
    import equinox as eqx
    import paramax
    from flowjax import distributions, flows

    base = distributions.Normal(jnp.zeros(4))
    flow = flows.masked_autoregressive_flow(jax.random.key(0), base_dist=base, flow_layers=2, nn_width=8)
    is_fixed = functools.partial(_is_a, paramax.NonTrainable)
    arrays, static = eqx.partition(flow, eqx.is_inexact_array, is_leaf=is_fixed)

    def loss_of(arrays, batch):
        return -paramax.unwrap(eqx.combine(arrays, static)).log_prob(batch["x"]).mean()

    return trained(loss_of, arrays, {"x": noise(BATCH, 4)}, optax.sgd(0.01))


@library_step(
    "ott",
    refused=mixes_examples("relates examples of the batch"),
)
def ott_optimal_transport_as_a_loss():
    from ott.geometry import pointcloud
    from ott.tools import sinkhorn_divergence

    def loss_of(params, batch):
        made = perceptron(params, batch["z"])
        found = sinkhorn_divergence.sinkhorn_divergence(
            pointcloud.PointCloud, made, batch["x"], epsilon=0.5, solve_kwargs={"max_iterations": 20}
        )
        return found[0]

    return trained(loss_of, of_sizes(3, 16, 2), {"z": noise(BATCH, 3), "x": noise(BATCH, 2)})


@library_step("tinygp", refused={"stages": "0 forward operations, too few for 2 stages"})
def tinygp_marginal_likelihood():
    """The examples are the rows and columns of one matrix."""
    import tinygp

    def loss_of(params, batch):
        kernel = jnp.exp(params["height"]) * tinygp.kernels.Matern32(jnp.exp(params["length"]))
        process = tinygp.GaussianProcess(kernel, batch["x"], diag=jnp.exp(params["noise"]), mean=params["mean"])
        return -process.log_probability(batch["y"])

    params = {name: jnp.float32(0) for name in ("height", "length", "noise", "mean")}
    return trained(loss_of, params, {"x": jnp.sort(noise(BATCH)), "y": noise(BATCH)}, optax.sgd(0.01))


@library_step("blackjax")
def blackjax_langevin_dynamics():
    """A step of sampling: the state is the sample, the key is part of it."""
    import blackjax

    def log_density(params, batch):
        return -0.5 * optax.tree.norm(params, squared=True) - 10 * cross_entropy(
            perceptron(params, batch["x"]), batch["y"]
        )

    sampler = blackjax.sgld(jax.grad(log_density))

    def step(state, batch):
        key, now = jax.random.split(state["key"])
        return {"params": sampler.step(now, state["params"], batch, 1e-3), "key": key}, log_density(
            state["params"], batch
        )

    return step, {"params": of_sizes(8, 16, 4), "key": jax.random.key(0)}, labelled(8)
