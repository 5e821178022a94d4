"""The outer search: one mesh or stages, how many microbatches, which schedule, what is computed again."""
