"""Memory of use: requests that agents served, which lift these agents for requests alike (G5–G8)."""
