"""The errors of the client, all below :class:`ClientError`."""


class ClientError(Exception):
    """The request to the mediator failed; the text says why."""


class ProblemError(ClientError):
    """The mediator replied with a problem report, a denial, or a failed result; nothing was changed."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}" if code else text)
        self.code = code
        """As the mediator wrote it; empty where its protocol has none (RFC 0685 on live mode)."""
        self.text = text


class HttpStatusError(ClientError):
    """The endpoint returned an HTTP status other than 2xx."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status
        self.text = text


class NoAnswerError(ClientError):
    """An expected answer did not come: too late, no connection, or a closed one."""
