"""A training step in closed form: work of a transformer's or a residual network's layers, priced on a cluster."""
