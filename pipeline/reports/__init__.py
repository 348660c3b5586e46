"""Reports on usage, as tables and as a page."""
