"""What finds, prints and compares plans: `plan`, `explain`, `diff`, `rank`, `cache`."""
