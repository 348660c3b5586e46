"""Cards by the million: read and given vectors by Spark, kept in the lake, handed to the registry in bulk."""
