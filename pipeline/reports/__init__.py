"""Reports on usage, as tables and as a page."""

ADDRESSES = (
    "Whoever knows the address of a mailbox may read its mail: keep this page to yourself. Groups stand here by number."
)
"""The sentence of a page that names mailboxes by their addresses."""
