"""Published training runs replayed: rows read, their layers planned, their steps predicted, and the errors."""
