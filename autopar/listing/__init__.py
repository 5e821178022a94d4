"""What a compiled step runs, as text to read: its modules, and its program with explicit collectives."""
