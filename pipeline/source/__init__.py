"""Mail and the journal as a Spark data source, and rows as mail."""
