"""Writes the tables of a run into the pages, between the comments that mark their places."""

import re
from collections.abc import Iterable
from pathlib import Path

from benchmarks.bench import UNSTEADY, ResultRow

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "benchmark-results.md"
SCALE = ROOT / "docs" / "scale.md"
HEADLINES = "headlines"
"""Name of the table that opens the page of results: the rows to look at first."""
SUMMARY = "summary"
"""Name of README's table: a few of the headlines, without what they were aimed at and how far rounds differed."""
OF_SUMMARY = (
    "SEND, 100 in flight / ",
    "FETCH 100 + ACK each / JetStream, each answered",
    "DIDComm v1 forwards, queued on disk, 16 at a time / ",
    "a million mailboxes, 10 000 of them used: resident, service",
    "3 × kill -9: missing",
)
"""What the claims of README's rows begin with."""
MET = {True: "yes", False: "NO", None: "-"}


COLUMNS = ("claim", "ours", "peer", "ratio", "spread", "aimed at", "met")
SUMMARY_COLUMNS = 4


def table(rows: Iterable[ResultRow], columns: int = len(COLUMNS)) -> str:
    """Return the first columns of the rows as a table in Markdown."""
    lines = [f"| {' | '.join(COLUMNS[:columns])} |", "|---" * columns + "|"]
    for row in rows:
        cells = (row.claim, row.ours, row.peer, row.ratio, _spread(row.spread), row.limit, MET[row.met])
        lines.append(f"| {' | '.join(cells[:columns])} |")
    return "\n".join(lines)


def summary(headlines: Iterable[ResultRow]) -> list[ResultRow]:
    """Return the rows that README shows; what CPU a claim costs is left to the page of results."""
    return [row for row in headlines if row.claim.startswith(OF_SUMMARY) and "CPU" not in row.claim]


def _spread(spread: float | None) -> str:
    if spread is None:
        return "-"
    percent = f"{spread * 100:.0f} %"
    return f"**{percent}: unsteady**" if spread > UNSTEADY else percent


def write(name: str, text: str) -> list[Path]:
    """Replace the text of this name in every page that has a place for it; return those pages."""
    place = re.compile(rf"(<!-- bench: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    written = []
    for page in (README, RESULTS, SCALE):
        before = page.read_text()
        after = place.sub(lambda found: f"{found[1]}{text}\n{found[2]}", before)
        if place.search(before):
            page.write_text(after)
            written.append(page)
    return written
