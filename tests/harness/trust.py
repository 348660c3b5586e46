"""Which certificates programs trust that get nothing else of this machine's environment."""

import os

NAMES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT")
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
"""What Debian's programs trust; pip and uv trust lists of their own."""


def trusted() -> dict[str, str]:
    """Return the variables that say so."""
    given = {name: os.environ[name] for name in NAMES if name in os.environ}
    return given or ({"PIP_CERT": BUNDLE, "SSL_CERT_FILE": BUNDLE} if os.path.exists(BUNDLE) else {})
