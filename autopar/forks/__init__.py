"""Forks of this process: jobs that they do, and signals that wait until a fork has been made."""
