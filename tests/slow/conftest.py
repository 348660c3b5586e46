"""What slow tests print although they passed: a test records it as the property ``printed``."""

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "printed":
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(value)
