"""Plans kept on disk: what a step is known by, the files, and when a kept plan takes the place of a search."""
