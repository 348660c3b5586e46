"""Checks of DIDComm mediators, v1 and v2, by a wallet and its correspondents; :data:`SUITE` holds them all."""

from conformance.didcomm import envelopes, general, live, mediation, pickup, pickup_1, routing
from conformance.didcomm.session import SUITE, DidcommSession
from conformance.didcomm.target import Target

FILES = (general, mediation, routing, pickup, live, pickup_1, envelopes)
"""Whose import adds the checks to the suite."""

__all__ = ["SUITE", "DidcommSession", "Target"]
