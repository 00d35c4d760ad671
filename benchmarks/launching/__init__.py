"""What benchmarks.launch starts: the two programs, and a slow file system."""
