"""What the outer search compares: timetables, and what steps and layers take in them; and its tuned numbers."""
