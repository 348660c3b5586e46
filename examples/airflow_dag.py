"""An Airflow DAG: each hour the mediator's journal and archive are taken into the lake, and reported on.

Needs Airflow 3 with the provider `standard`, and `agent-mediator[pipeline]` where its tasks run: there `mediator` is on
the PATH, and MEDIATOR_DATA_DIR in the environment names the service's data directory. Put this file into Airflow's
folder of DAGs, and try it::

    airflow dags reserialize
    airflow dags test mediator_pipeline

One process at a time works on a lake, so the tasks are a chain, and runs of the DAG do not overlap. A task may be
repeated at any time: it continues where the failed one stopped. To run Spark elsewhere, add --master (docs/cluster.md).
In an environment without Spark, run the same commands in the pipeline's image, with the operators of Kubernetes or
Docker.
"""

from datetime import datetime, timedelta

from airflow.sdk import dag, task


@dag(
    schedule="@hourly",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 3, "retry_delay": timedelta(minutes=5), "execution_timeout": timedelta(minutes=50)},
)
def mediator_pipeline() -> None:
    """Take in the journal, then the archive, and report."""

    @task.bash
    def ingest() -> str:
        return "mediator pipeline ingest"

    @task.bash
    def archive() -> str:
        return "mediator pipeline archive"

    @task.bash
    def report() -> str:
        return "mediator pipeline report"

    ingest() >> archive() >> report()


mediator_pipeline()
