"""The options of the data pipeline that the service runs by itself."""

from pathlib import Path

from pydantic import Field

from mediator.settings.types import PartSettings, Whole


class PipelineSettings(PartSettings):
    """The data pipeline: the service itself has journal and archive taken into the lake, and reported on."""

    every: Whole = Field(
        default=0,
        ge=0,
        le=31 * 24,
        description="Hours between two runs of `mediator pipeline ingest`, `archive` and `report` into the folder "
        "`lake` in data_dir, as a child process of low priority on one core; 0 runs nothing. Set it where "
        "`agent-mediator[pipeline]` is installed and no scheduler of yours does it; `mediator pipeline runs` shows "
        "what came of it.",
    )
    max_minutes: Whole = Field(
        default=60,
        ge=1,
        le=31 * 24 * 60,
        description="Minutes each of the commands may take; then it is ended, and what it has not done is left to the "
        "next. Protects the machine. Raise it if runs exceed it.",
    )
    delivery_goal_seconds: Whole = Field(
        default=60,
        ge=1,
        le=31 * 86_400,
        description="Seconds within which mail should be delivered to a group for the first time. The report shows how "
        "much of it was. Waits are kept with two digits, so 120 is exact and 125 counts as 130.",
    )
    archive_key_file: Path | None = Field(
        default=None,
        description="File of keys that seal payloads and headers in the archive, each a line of base64 of 32 bytes, "
        "for `mediator pipeline archive` and `replay`; without one they are kept in clear. Protects what was said "
        "from who can read the lake. Set it before the first message is archived, and keep a copy of the file.",
        examples=["/etc/mediator/archive.keys"],
    )
