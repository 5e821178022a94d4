"""Attention as one operation, forward and backward, in memory that grows with the sequence and not with its square."""
