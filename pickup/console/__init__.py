"""The console's pages of the DIDComm door."""
