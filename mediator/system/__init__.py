"""Help with the operating system: private files, file descriptors, memory, child processes."""
