"""The journal of lifecycle events, in files for reports on usage; docs/journal.md is their format."""

from mediator.journal.segments import FOLDER, count_accepted, events, mark_read

__all__ = ["FOLDER", "count_accepted", "events", "mark_read"]
