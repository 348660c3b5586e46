"""Media types under which envelopes travel over HTTP; agents of old have names of their own for v1 (RFC 0025, 0044)."""

from mediator.mediation.records import Generation

V1 = ("application/didcomm-envelope-enc", "application/ssi-agent-wire")
V2 = ("application/didcomm-encrypted+json",)
UNSPECIFIC = "application/json"

ACCEPTED = frozenset({*V1, *V2, UNSPECIFIC})
WRITTEN = {Generation.V1: V1[0], Generation.V2: V2[0]}
