"""What the command line does: values of its flags, planning and showing plans, training, calibrating, simulating.

`autopar.__main__` reads the arguments with `parser`, which needs no JAX, so that help and errors come at once. Then one function
of another module here runs. The flags of XLA have to be in the environment before a device is touched.
"""
