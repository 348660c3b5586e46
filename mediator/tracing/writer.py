"""Records how long traced requests waited for their commit, and how long that took."""

import time
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Link, Span, Tracer

from mediator.mailboxes.mailbox import MailboxKey
from mediator.request_context import trace_id
from mediator.store.writer import Committed, Done, Outcomes, WriteJob, Writer


class TracedJob(WriteJob):
    """A job that knows the span of its request, if that is sampled, and when it came; times are nanoseconds."""

    def __init__(
        self,
        key: MailboxKey | None,
        work: Any,
        done: Done,
        even_when_full: bool = False,
        second_key: MailboxKey | None = None,
    ) -> None:
        super().__init__(key, work, done, even_when_full, second_key)
        # Asked first, since it is cheaper.
        span = None if trace_id.get() is None else trace.get_current_span()
        self.span: Span | None = span if span is not None and span.is_recording() else None
        self.came_at = self.began_at = self.ended_at = time.time_ns() if self.span else 0


class TracedWriter(Writer):
    """Gives the span of each request two children, queue and commit.

    One group commit is one span: a child of the first of its requests, linked to the others, whose own commits link to
    it.
    """

    job_type = TracedJob

    def __init__(self, tracer: Tracer, *args: Any) -> None:
        self._tracer = tracer
        super().__init__(*args)

    def _commit(self, batch: list[WriteJob]) -> tuple[Outcomes, Committed]:
        began_at = time.time_ns()
        outcomes, committed = super()._commit(batch)
        ended_at = time.time_ns()
        for job, _ in outcomes:
            if isinstance(job, TracedJob):
                job.began_at, job.ended_at = began_at, ended_at
        return outcomes, committed

    def _answer(self, outcomes: Outcomes, committed: Committed | None) -> None:
        super()._answer(outcomes, committed)
        # After the answers, which are not to wait for it.
        if committed is not None:
            traced = [(job, job.span) for job, _ in outcomes if isinstance(job, TracedJob) and job.span is not None]
            if traced:
                self._record(traced, committed.size)

    def _record(self, traced: list[tuple[TracedJob, Span]], size: int) -> None:
        links = [Link(span.get_span_context()) for _, span in traced[1:]]
        for job, span in traced:
            context = trace.set_span_in_context(span)
            self._tracer.start_span("queue", context, start_time=job.came_at).end(max(job.came_at, job.began_at))
            commit = self._tracer.start_span(
                "commit", context, attributes={"mediator.batch.size": size}, links=links, start_time=job.began_at
            )
            commit.end(job.ended_at)
            if job is traced[0][0]:
                links = [Link(commit.get_span_context())]
