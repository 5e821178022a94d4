"""JAX's coordination service in one process: a table that threads share, each of which plays a process."""

import threading

import jax


class Table:
    """What `autopar.compat.Coordination` asks for; `looks` counts who asks for a folder, `trouble` is what every wait ends in."""

    def __init__(self):
        self.entries = {}
        self.changed = threading.Condition()
        self.trouble = None
        self.looks = 0

    def key_value_set_bytes(self, key, value):
        with self.changed:
            if key in self.entries:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.entries[key] = value
            self.changed.notify_all()

    def key_value_delete(self, key):
        with self.changed:
            below = [name for name in self.entries if name == key or (key.endswith("/") and name.startswith(key))]
            for name in below:
                del self.entries[name]

    def blocking_key_value_get_bytes(self, key, timeout_in_ms):
        with self.changed:
            if self.trouble is not None:
                raise jax.errors.JaxRuntimeError(self.trouble)
            if not self.changed.wait_for(lambda: key in self.entries, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
            return self.entries[key]

    def key_value_dir_get_bytes(self, key):
        with self.changed:
            self.looks += 1
            return [(name, value) for name, value in self.entries.items() if name.startswith(key)]
