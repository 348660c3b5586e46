"""The domain of the registry: which agents there are, when they last gave a sign of life, and what becomes of them."""
