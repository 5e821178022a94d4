"""Compiled programs against their plan: collectives, transfers, memory, arithmetic, values."""
