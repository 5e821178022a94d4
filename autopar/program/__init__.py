"""From a Python step to a Program: binding a call's arguments, tracing, the program as data, retracing, its fingerprint."""
