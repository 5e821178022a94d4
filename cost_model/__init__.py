"""Seconds and bytes of operations and collectives on a cluster; imports nothing of the compiler."""
