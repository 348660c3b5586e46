"""A Spark job: it reads the orders in a mailbox, adds them up, and sends the totals to another mailbox.

Needs the extra `pipeline` (`pip install 'agent-mediator[pipeline]'` also brings Java). Beside a running service::

    mediator mailbox create example.orders
    mediator mailbox create example.totals
    mediator send example.orders '{"product": "tea", "price": 4}'
    mediator send example.orders '{"product": "tea", "price": 5}'
    python examples/spark_job.py [mediator-data] [nats://HOST:PORT]
    mediator query example.totals

The data source reads the service's database, read-only, so reading moves no consumer group; it sends over NATS like any
other client. On a cluster: `--master` and PostgreSQL, see docs/cluster.md.
"""

import sys

from pyspark.sql import functions as F

from pipeline.session import session
from pipeline.source.datasource import register

DATA_DIR = sys.argv[1] if len(sys.argv) > 1 else "mediator-data"
URL = sys.argv[2] if len(sys.argv) > 2 else "nats://127.0.0.1:4222"


def main() -> None:
    """Read, add up, send."""
    spark = session(name="orders")
    register(spark)

    mail = spark.read.format("mq9").option("data.dir", DATA_DIR).option("subscribe", "example.orders").load()
    order = F.from_json(mail.payload.cast("string"), "product STRING, price DOUBLE")
    totals = (
        mail.select(order.alias("order"))
        .groupBy("order.product")
        .agg(F.count("*").alias("orders"), F.sum("order.price").alias("total"))
        .orderBy("product")
        .cache()
    )
    totals.show()

    # One message for each product: with a key, it replaces the total of the run before.
    rows = totals.select(F.col("product").alias("key"), F.to_json(F.struct(*totals.columns)).alias("payload"))
    rows.write.format("mq9").mode("append").option("address", "example.totals").option("nats.url", URL).save()
    spark.stop()


if __name__ == "__main__":
    main()
