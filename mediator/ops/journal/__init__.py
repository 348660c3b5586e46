"""The journal of lifecycle events, in files for reports on usage; docs/journal.md is their format."""

from mediator.ops.journal.lines import count_accepted, events
from mediator.ops.journal.segments import FOLDER, mark_read

__all__ = ["FOLDER", "count_accepted", "events", "mark_read"]
