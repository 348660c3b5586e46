"""What can go wrong between the client and a mediator."""


class ClientError(Exception):
    """The mediator could not be used as asked; the text says why."""


class ProblemError(ClientError):
    """The mediator answered with a problem report, a denial, or a failed result; nothing was changed."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}" if code else text)
        self.code = code
        """As the mediator wrote it; empty where its protocol has none (RFC 0685 on live mode)."""
        self.text = text


class RefusedError(ClientError):
    """The endpoint answered with an HTTP status that is no success."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status
        self.text = text


class NoAnswerError(ClientError):
    """No answer where one was due: in time, on the connection that was to carry it, or at all."""
