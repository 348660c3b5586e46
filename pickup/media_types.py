"""Media types of envelopes over HTTP: RFC 0044 for v1, with the older one of RFC 0025, and didcomm.org for v2."""

from pickup.rules.records import Generation

V1 = ("application/didcomm-envelope-enc", "application/ssi-agent-wire")
V2 = ("application/didcomm-encrypted+json",)
UNSPECIFIC = "application/json"

ACCEPTED = frozenset({*V1, *V2, UNSPECIFIC})
WRITTEN = {Generation.V1: V1[0], Generation.V2: V2[0]}
