"""The journal of lifecycle events, in files for reports on usage; docs/journal.md is their format."""

from mediator.ops.journal.lines import events
from mediator.ops.journal.segments import FOLDER, mark_read

__all__ = ["FOLDER", "events", "mark_read"]
