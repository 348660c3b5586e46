"""The search index of each tenant: analysis, keywords, vectors, ranking, and the task that keeps it current."""
