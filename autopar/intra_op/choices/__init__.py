"""What each operation of a program may choose on a mesh, what it costs, and the graph of all choices."""
