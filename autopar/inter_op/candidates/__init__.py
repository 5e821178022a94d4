"""What the outer search compares: timetables; and its tuned numbers."""
