"""What the command line does.

`autopar.__main__` reads the arguments with `parser`, which knows the commands from `table` and needs no JAX, so that help
and errors come at once. Then one function of a folder here runs. The flags of XLA have to be in the environment before a
device is touched.
"""
