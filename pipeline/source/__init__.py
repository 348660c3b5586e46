"""Mail and the journal as a Spark data source, and rows as mail."""

from pipeline.requirements import check_installed

# An older pyspark would fail in one of the imports below, or only once a stream is started.
check_installed()
