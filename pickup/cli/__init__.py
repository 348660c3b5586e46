"""The commands of DIDComm."""
