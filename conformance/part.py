"""What conformance brings to the program: commands, and nothing to the running service."""

from typing import TYPE_CHECKING

from mediator.parts import Part

if TYPE_CHECKING:
    import typer


class ConformancePart(Part):
    """Checks that anybody can run against any mediator."""

    name = "conformance"

    def add_commands(self, app: "typer.Typer") -> None:
        """Add conformance."""
        from conformance import cli

        app.add_typer(cli.app, name="conformance")


part = ConformancePart()
