"""What operators see and change of the DIDComm door: operations and pages of the console."""
