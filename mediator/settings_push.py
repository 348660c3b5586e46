"""The options of mail that is pushed to subscriptions."""

from pydantic import BaseModel, Field

from mediator.settings_types import CLOSED, Whole

DAY = 24 * 3600 * 1000


class Push(BaseModel):
    """Mail that is pushed to NATS subscriptions, as clients of the older editions expect it."""

    model_config = CLOSED

    keep_days: Whole = Field(
        default=7,
        ge=1,
        le=3650,
        description="Days the position of a NATS queue group outlives its last member; then a new member starts from "
        "the oldest message. Raise it when workers stay away for longer.",
    )
    max_subscriptions: Whole = Field(
        default=20_000,
        ge=1,
        le=1_000_000,
        description="Subscriptions to stored mail that this instance serves. Protects its memory, about 10 KB each; "
        "more wait for another instance.",
    )
    tenant_subscriptions: Whole = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="The same for one tenant, whose clients are told when there are more. Protects the other tenants.",
    )
