"""How far mail was pushed, in SQL."""

from collections.abc import Sequence

from mediator.mailboxes.lanes import LANES
from mediator.mailboxes.mailbox import Mailbox
from mediator.store.session import Table


class Pushed(Table):
    """See :class:`mediator.mailboxes.ports.Pushed`."""

    def raise_to(self, mailbox: Mailbox, marks: Sequence[int]) -> None:
        self._dialect.many(
            "INSERT INTO pushed (mailbox_no, lane, msg_id) VALUES (?, ?, ?) ON CONFLICT (mailbox_no, lane)"
            " DO UPDATE SET msg_id = excluded.msg_id WHERE excluded.msg_id > pushed.msg_id",
            [(mailbox.no, lane.value, mark) for lane, mark in zip(LANES, marks, strict=True) if mark >= 0],
        )

    def marks(self, mailbox: Mailbox) -> list[int]:
        found = self._execute("SELECT lane, msg_id FROM pushed WHERE mailbox_no = ?", (mailbox.no,))
        marks = {int(lane): int(msg_id) for lane, msg_id in found}
        return [marks.get(lane.value, -1) for lane in LANES]

    def unread(self, mailbox: Mailbox, now: int) -> int:
        self._session.flush()
        total = 0
        for lane, mark in zip(LANES, self.marks(mailbox), strict=True):
            sql = (
                f"SELECT count(*) FROM {self._dialect.lane_source(lane)} WHERE lane = {lane.value}"
                " AND mailbox_no = ? AND msg_id > ? AND (expire_at IS NULL OR expire_at > ?)"
            )
            total += int(self._session.one(sql, (mailbox.no, mark, now))[0])
        return total
