"""Primitives that the table does not list: how a user registers a rule, and what is said of those that have none."""
