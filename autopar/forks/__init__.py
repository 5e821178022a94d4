"""Forks of this process: jobs that they do, and signals that wait while one is made, or ended."""
