"""The rules of DIDComm mediation: who is connected, which keys lead to which mailbox, what is picked up (D1–D13)."""
