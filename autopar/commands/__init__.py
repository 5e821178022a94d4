"""What the command line does: values of its flags, planning and showing plans, training.

`autopar.__main__` reads the arguments and calls one function here. Modules import JAX inside functions where they can:
the flags of XLA have to be in the environment before a device is touched, and `--help` needs no JAX.
"""
