"""What the words of a command line stand for: values of flags, the step that is named, devices, and wishes for a plan."""
