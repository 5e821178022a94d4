"""One program on one mesh: what each operation may choose, what it costs, which plan is best, how it is lowered."""
