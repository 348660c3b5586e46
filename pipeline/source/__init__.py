"""The Spark data source ``mq9``: mailboxes and the journal as input, mail as output."""

from pipeline.requirements import check_installed

# An older pyspark would fail in one of the imports below, or only once a stream is started.
check_installed()
