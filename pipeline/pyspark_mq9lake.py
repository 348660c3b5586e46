"""Tells Spark of the format ``mq9lake``, as ``pyspark_mq9`` of ``mq9``: a module has one format."""

import contextlib

# An environment may have Spark without what the format needs; an error here would end all Python sources there.
with contextlib.suppress(ImportError):
    from pipeline.lake.datasource import LakeDataSource as DefaultSource  # noqa: F401
