"""The console's pages of the registry."""
