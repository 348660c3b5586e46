"""The journal's files: names, rotation, the bound, gaps, and what a crash leaves behind."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from mediator.journal.segments import ACTIVE, Segments, closed_segments, mark_read, read_gaps, read_segment

KIB = 1024


class Folder:
    """A folder, and the segments that one run after the other has in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.drops = 0
        self.seq = 0

    def open(self, **options: Any) -> Segments:
        given = {"segment_bytes": KIB, "total_bytes": 4 * KIB, "segment_seconds": 3600.0} | options
        return Segments(self.path, "host-1", on_drop=self._dropped, **given)

    def _dropped(self) -> None:
        self.drops += 1

    def line(self, events: int = 1) -> bytes:
        """A line of some 100 bytes."""
        self.seq += 1
        line = {"instance": "host-1", "seq": self.seq, "at": [1000 + self.seq], "what": [4] * events, "pad": "x" * 40}
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)

    def fill(self, segments: Segments, files: int) -> None:
        """Write until so many files were closed."""
        for _ in range(files):
            while not segments.rotation_due:
                segments.append(self.line())
            segments.rotate(self.seq + 1)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir())

    def seqs(self) -> list[int]:
        return [line["seq"] for path in closed_segments(self.path) for line in read_segment(path)]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "journal")


def test_a_file_is_closed_under_another_name_when_it_is_full(folder: Folder) -> None:
    segments = folder.open()
    assert segments.close_former()
    segments.open(1)
    assert folder.names() == [f"{1:020d}-host-1.jsonl.open"]
    folder.fill(segments, 2)
    first, second, third = folder.names()
    assert first == f"{1:020d}-host-1.jsonl"
    assert second.endswith("-host-1.jsonl")
    assert third == f"{folder.seq + 1:020d}-host-1.jsonl.open"
    assert folder.seqs() == list(range(1, folder.seq + 1))
    assert all(path.stat().st_size >= KIB for path in closed_segments(folder.path))


def test_a_file_is_closed_after_its_time_but_never_empty(folder: Folder) -> None:
    segments = folder.open(segment_seconds=0.0)
    segments.close_former()
    segments.open(1)
    assert not segments.rotation_due
    segments.append(folder.line())
    assert segments.rotation_due


def test_closing_in_good_order_leaves_only_closed_files(folder: Folder) -> None:
    segments = folder.open()
    segments.close_former()
    segments.open(1)
    segments.close(complete=True)
    assert folder.names() == []
    segments.open(1)
    segments.append(folder.line())
    segments.close(complete=True)
    assert [path.suffix for path in folder.path.iterdir()] == [".jsonl"]
    assert folder.open().close_former()


def test_a_torn_line_is_cut_off(folder: Folder) -> None:
    segments = folder.open()
    segments.close_former()
    segments.open(1)
    segments.append(folder.line() + folder.line())
    segments.close(complete=False)
    (left,) = folder.path.glob(f"*{ACTIVE}")
    with left.open("ab") as file:
        file.write(folder.line()[:-7])
    assert [line["seq"] for line in read_segment(left)] == [1, 2]
    assert not folder.open().close_former()
    assert folder.seqs() == [1, 2]
    assert not list(folder.path.glob(f"*{ACTIVE}"))


def test_a_file_with_nothing_but_a_torn_line_goes(folder: Folder) -> None:
    segments = folder.open()
    segments.close_former()
    segments.open(1)
    segments.close(complete=False)
    (left,) = folder.path.glob(f"*{ACTIVE}")
    left.write_bytes(b'{"instance":"ho')
    assert not folder.open().close_former()
    assert folder.names() == []


def test_the_oldest_unread_file_is_dropped_for_space(folder: Folder) -> None:
    segments = folder.open()
    segments.close_former()
    segments.open(1)
    folder.fill(segments, 1)
    oldest = closed_segments(folder.path)[0]
    size, held = oldest.stat().st_size, folder.seqs()
    folder.fill(segments, 3)
    assert folder.drops >= 1
    assert sum(path.stat().st_size for path in closed_segments(folder.path)) + KIB <= 4 * KIB
    gap = read_gaps(folder.path)[0]
    assert gap.pop("at") > 0
    assert gap == {
        "why": "space",
        "segment": oldest.name,
        "seqs": {"host-1": [held[0], held[-1]]},
        "from": 1000 + held[0],
        "to": 1000 + held[-1],
        "events": len(held),
        "bytes": size,
    }
    assert [gap["segment"] for gap in read_gaps(folder.path)] == sorted(g["segment"] for g in read_gaps(folder.path))
    lost = sum(gap["events"] for gap in read_gaps(folder.path))
    assert folder.seqs() == list(range(lost + 1, folder.seq + 1))


def test_a_file_that_was_read_goes_without_a_gap(folder: Folder) -> None:
    segments = folder.open()
    segments.close_former()
    segments.open(1)
    folder.fill(segments, 2)
    mark_read(folder.path, closed_segments(folder.path)[-1].name)
    folder.fill(segments, 2)
    assert len(closed_segments(folder.path)) < 4
    assert folder.drops == 0
    assert read_gaps(folder.path) == []


def test_a_write_that_fails_leaves_whole_lines(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = folder.open()
    segments.close_former()
    segments.open(1)
    segments.append(folder.line())

    monkeypatch.setattr("mediator.journal.segments.os.fsync", _no_space)
    with pytest.raises(OSError, match="no space"):
        segments.append(folder.line())
    monkeypatch.undo()
    segments.append(folder.line())
    segments.close(complete=True)
    assert folder.seqs() == [1, 3]


def _no_space(file: int) -> None:
    raise OSError(28, "no space")
