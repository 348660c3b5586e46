"""Checks of DIDComm mediators, v1 and v2, by a wallet and its correspondents; :data:`SUITE` holds them all."""

from conformance.didcomm import general
from conformance.didcomm.session import SUITE, DidcommSession
from conformance.didcomm.target import Target

__all__ = ["SUITE", "DidcommSession", "Target", "general"]
