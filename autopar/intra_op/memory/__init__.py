"""What one device keeps: predicted temporaries of a planned step, and the peak of memory."""
