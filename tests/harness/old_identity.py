"""An identity as the first releases made it: with P-256 and P-384 keys, and a did:peer:2 that names them."""

OLD_SECRET = b"""{
 "Ed25519": "AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyA",
 "X25519": "AgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4fICE",
 "P-256": "AwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISI",
 "P-384": "BAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAhIiMkJSYnKCkqKywtLi8wMTIz"
}"""
OLD_URL = "https://mediator.example.com/didcomm"
OLD_DID = (
    "did:peer:2"
    ".Ez6LSoE7dhWxbP8nAM7ARjXCR5YRFinKNWziKT1Mca7vo413f"
    ".EzDnaeZHeyuHWHBusLoE6GmQurAVtv6iVmnZPVHpnPnPRhqp2T"
    ".Ez82Lm1n4EGpNNbxjXyNudwoqbBof5vUJhQ6F5fuaxEJJ1G8bfg4Vqg8CngEwjdJefLvEXFJ"
    ".Vz6MkneMkZqwqRiU5mJzSG3kDwzt9P8C59N4NGTfBLfSGE7c7"
    ".SeyJ0IjoiZG0iLCJzIjoiaHR0cHM6Ly9tZWRpYXRvci5leGFtcGxlLmNvbS9kaWRjb21tIiwiciI6W10sImEiOlsiZGlkY29tbS92MiJdfQ"
    ".SeyJ0IjoiZG0iLCJzIjoid3NzOi8vbWVkaWF0b3IuZXhhbXBsZS5jb20vZGlkY29tbSIsInIiOltdLCJhIjpbImRpZGNvbW0vdjIiXX0"
)
