"""Help with the operating system: private files, file descriptors, child processes."""
