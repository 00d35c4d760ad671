"""The programs of benchmarks.launch, and a slow file system."""
