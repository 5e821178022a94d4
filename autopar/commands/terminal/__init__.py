"""What a terminal shows while a plan is sought, and how Ctrl-C ends the search."""
