"""Files that people keep: written whole or not at all, and read with every value checked."""
