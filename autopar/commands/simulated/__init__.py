"""What prices published runs and saved plans on clusters that one need not own: `simulate`."""
