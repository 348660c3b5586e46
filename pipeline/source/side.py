"""Which side of Spark looks at a path: the same path may be another folder on each machine."""

import socket
import sys

from pyspark import TaskContext


def who_looked() -> str:
    """Return the end of an error about a path: which side looked, and where; nothing outside of Spark's workers.

    With Spark Connect the driver is the server, so all paths are the server's.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if main is None or not main.name.startswith("pyspark."):
        return ""
    side = "Spark's driver" if TaskContext.get() is None else "an executor"
    return f"; {side} looked, on {socket.gethostname()}"
