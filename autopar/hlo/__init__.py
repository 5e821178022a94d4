"""The text of compiled programs read again: computations, collectives, contractions. Knows nothing of plans."""
