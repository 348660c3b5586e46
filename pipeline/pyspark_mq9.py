"""Tells Spark of the format ``mq9``: it looks for installed modules whose names begin with ``pyspark_``.

So it is installed beside the packages of this project. Spark calls ``DefaultSource`` in each session, also of SQL.
"""

import contextlib

# An environment may have Spark without what the format needs; an error here would end all Python sources there.
with contextlib.suppress(ImportError):
    from pipeline.source.datasource import MailDataSource as DefaultSource  # noqa: F401
