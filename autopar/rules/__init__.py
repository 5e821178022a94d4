"""What each primitive does: a factor rule in notation, one table of all primitives, and how an equation runs on one shard."""
