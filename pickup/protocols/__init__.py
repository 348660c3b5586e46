"""The protocols, one module each; each registers its handlers with the dispatcher."""
