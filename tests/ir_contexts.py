"""MLIR contexts that several modules share, as JAX 0.12 has them; with JAX 0.10 each module that is lowered makes one, for 5 ms.

A context belongs to one thread at a time; when that ends, the next one takes it over. It is used for few modules, because it
keeps the types, constants and places in files of all of them.
"""

import threading
from importlib.metadata import version

MODULES = 50


class Shared:
    """Contexts that wait for a thread, and the one that each thread has."""

    def __init__(self, make):
        self.make, self.waiting, self.of_thread = make, [], threading.local()

    def take(self):
        """The context for the next module of this thread."""
        lease = getattr(self.of_thread, "lease", None)
        if lease is None:
            lease = self.of_thread.lease = _Lease(self.waiting)
        return lease.context(self.make)


class _Lease:
    """A thread's context, and for how many modules it still is; it waits for another thread when this one has ended."""

    def __init__(self, waiting):
        self.waiting = waiting
        try:
            self.held, self.left = waiting.pop()
        except IndexError:
            self.held, self.left = None, 0

    def context(self, make):
        if self.left == 0:
            self.held, self.left = make(), MODULES
        self.left -= 1
        return self.held

    def __del__(self):
        if self.held is not None:
            self.waiting.append((self.held, self.left))


def share_contexts():
    """Let what JAX lowers from now on share contexts, where JAX does not see to that itself."""
    if version("jax").startswith("0.10."):
        from jax._src.interpreters import mlir  # noqa: TID251 - JAX 0.10 has no setting for it

        mlir.make_ir_context = Shared(mlir.make_ir_context).take
