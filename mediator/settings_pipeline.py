"""The options of the data pipeline that the service runs by itself."""

from pydantic import BaseModel, Field

from mediator.settings_types import CLOSED, Whole


class Pipeline(BaseModel):
    """The data pipeline: the service itself has the journal taken into the lake and reported on."""

    model_config = CLOSED

    every: Whole = Field(
        default=0,
        ge=0,
        le=31 * 24,
        description="Hours between two runs of `mediator pipeline ingest` and `report` into the folder `lake` in "
        "data_dir, as a child process of low priority; 0 runs nothing. Set it where `agent-mediator[pipeline]` is "
        "installed and no scheduler of yours does it; `mediator pipeline runs` shows what came of it.",
    )
    max_minutes: Whole = Field(
        default=60,
        ge=1,
        le=31 * 24 * 60,
        description="Minutes each of the commands may take; then it is ended, and what it has not done is left to the "
        "next. Protects the machine. Raise it when a run says that its time was over.",
    )
