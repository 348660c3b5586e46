"""The options of the data pipeline that the service runs by itself."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from mediator.settings.settings import Settings
from mediator.settings.types import PartSettings, Whole
from pipeline.lake import REPORT, SCHEMES, ObjectPlace, Place, is_url

MAX_STORAGE_OPTIONS = 100


def _lake(value: str) -> str:
    if "://" in value and not is_url(value):
        raise ValueError(f"expected a folder, or a URL that begins with {', '.join(f'{name}://' for name in SCHEMES)}")
    return value


class PipelineSettings(PartSettings):
    """The data pipeline: the service itself has journal and archive taken into the lake, and reported on."""

    every: Whole = Field(
        default=0,
        ge=0,
        le=31 * 24,
        description="Hours between two runs of `mediator pipeline ingest`, `archive` and `report` into the folder "
        "`lake` in data_dir, or where `lake` says, as a child process of low priority on one core; 0 runs nothing. Set "
        "it where `agent-mediator[pipeline]` is installed and no scheduler of yours does it; `mediator pipeline runs` "
        "shows what came of it.",
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
    lake: Annotated[str, AfterValidator(_lake)] = Field(
        default="",
        description="Where the lake is, if not in the folder `lake` in data_dir: another folder, or the URL of a place "
        "in an object store (`s3://`, `gs://`, `abfs://`). In a store, all machines of a Spark cluster reach it.",
        examples=["s3://company-mail/lake"],
    )
    storage: dict[str, SecretStr] = Field(
        default_factory=dict,
        max_length=MAX_STORAGE_OPTIONS,
        description="What opens the object store, as text by the names of the storage options of deltalake: "
        "`aws_region`, `aws_access_key_id`, `aws_secret_access_key`, `aws_endpoint_url`, `google_service_account`, "
        "`azure_storage_account_key`, … What is not set here comes from the environment or the machine, such as "
        "`AWS_ACCESS_KEY_ID` or an instance profile. No value is shown anywhere.",
        examples=[{"aws_region": "eu-central-1"}],
    )
    archive_key_file: Path | None = Field(
        default=None,
        description="File of keys that seal payloads and headers in the archive, each a line of base64 of 32 bytes, "
        "for `mediator pipeline archive` and `replay`; without one they are kept in clear. Protects what was said "
        "from who can read the lake. Set it before the first message is archived, and keep a copy of the file.",
        examples=["/etc/mediator/archive.keys"],
    )


def lake_of(settings: Settings, lake: str | None = None) -> Place:
    """Return where the lake is: the place that was named, else that of the settings, else in the data directory."""
    chosen = settings.section(PipelineSettings)
    named = lake or chosen.lake
    if is_url(named):
        return ObjectPlace(named, tuple((name, each.get_secret_value()) for name, each in chosen.storage.items()))
    return Path(named or settings.data_dir / "lake").absolute()


def report_file(settings: Settings, lake: Place) -> Path:
    """Return where the page of a report is by default: in the lake, if that is a folder, else in the data directory."""
    return (lake if isinstance(lake, Path) else settings.data_dir.absolute()) / REPORT
