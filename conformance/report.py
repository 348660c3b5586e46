"""What came of a run, as counts, JSON and JUnit XML, and as the exit code of the command."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from conformance.checks import Level
from conformance.running import Outcome, Result

PASSED, FAILED, NOT_RUN = 0, 1, 2
"""Exit codes: all that was tried passed; something failed; nothing was tried, or something could not be."""
_ILLEGAL = re.compile(r"[^\t\n\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def exit_code(results: Sequence[Result]) -> int:
    """Return the exit code of a run. What is not offered counts neither way."""
    outcomes = Counter(result.outcome for result in results)
    if outcomes[Outcome.FAILED]:
        return FAILED
    return PASSED if outcomes[Outcome.PASSED] and not outcomes[Outcome.SKIPPED] else NOT_RUN


def summary(results: Sequence[Result]) -> str:
    """Return a line with how many checks of each level ended how."""
    parts = []
    for level in Level:
        counts = Counter(result.outcome for result in results if result.check.level is level)
        if counts:
            said = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome])
            parts.append(f"{level}: {said}")
    return "; ".join(parts)


def as_json(results: Sequence[Result], target: str, at: str) -> dict[str, Any]:
    """Return a run as JSON: ``target`` is what was tried, ``at`` the date and time."""
    return {
        "target": target,
        "at": at,
        "counts": dict(Counter(result.outcome.value for result in results)),
        "checks": [
            {
                "id": result.check.id,
                "level": result.check.level.value,
                "source": result.check.source,
                "sentence": result.check.sentence,
                "outcome": result.outcome.value,
                "detail": result.detail,
                "ms": result.milliseconds,
                "transcript": list(result.transcript),
            }
            for result in results
        ],
    }


def as_junit(results: Sequence[Result], target: str) -> bytes:
    """Return a run as JUnit XML, which CI servers show: a suite a level, a case a check."""
    root = ElementTree.Element("testsuites", name=f"mediator conformance {_legal(target)}")
    for level in Level:
        of_level = [result for result in results if result.check.level is level]
        if not of_level:
            continue
        failures = sum(result.outcome is Outcome.FAILED for result in of_level)
        skipped = sum(result.outcome in (Outcome.SKIPPED, Outcome.NOT_OFFERED) for result in of_level)
        counts = {"tests": str(len(of_level)), "failures": str(failures), "skipped": str(skipped), "errors": "0"}
        suite = ElementTree.SubElement(root, "testsuite", {"name": level.value, **counts})
        for result in of_level:
            family, _, name = result.check.id.rpartition(".")
            seconds = f"{result.milliseconds / 1000:.3f}"
            case = ElementTree.SubElement(suite, "testcase", classname=family, name=name, time=seconds)
            if result.outcome is Outcome.FAILED:
                said = ElementTree.SubElement(case, "failure", message=_legal(result.detail))
                said.text = _legal(_story(result))
            elif result.outcome is not Outcome.PASSED:
                ElementTree.SubElement(case, "skipped", message=_legal(f"{result.outcome.value}: {result.detail}"))
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))


def _story(result: Result) -> str:
    lines = [f"{result.check.source}: {result.check.sentence}", ""]
    lines += [
        f"{entry['ms']} ms {entry['direction']} {entry['what']}: {entry['content']}" for entry in result.transcript
    ]
    return "\n".join(lines)


def _legal(text: str) -> str:
    """Replace characters that XML 1.0 cannot hold (§2.2, Char), which a peer may have sent.

    A carriage return may stand there, but a reader turns it into a line feed.
    """
    return _ILLEGAL.sub("?", text)
