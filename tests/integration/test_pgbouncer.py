"""A pooler between the service and PostgreSQL: sessions that last work, others are refused at the start."""

import pytest

from mediator.errors import SetupError
from mediator.store.postgres import PostgresStore
from tests.harness.broker import Broker
from tests.harness.pgbouncer import pooled
from tests.harness.postgres import Server, ask, terminate_all

pytestmark = pytest.mark.postgres


def test_mail_passes_through_pooled_sessions(postgres: Server):
    with postgres.database() as url, pooled(url, "session") as through:
        stores = [PostgresStore(through) for _ in range(2)]
        one, other = map(Broker, stores)
        one.create()
        assert [one.send(b"0"), other.send(b"1")] == [0, 1]
        # The sessions end behind the pooler.
        terminate_all(url)
        # It has read that when it has answered what came later.
        ask(through, "SELECT 1")
        assert one.send(b"2") == 2
        assert other.take() == [0, 1, 2]
        for store in stores:
            with store.reading() as tx:
                assert tx.mailboxes.usage("default").messages == 3
            store.close()


@pytest.mark.parametrize("in_turn", [0, 1])
@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_pooled_transactions_are_refused_with_the_remedy(postgres: Server, mode: str, in_turn: int):
    options = {"server_round_robin": in_turn, "min_pool_size": 2 * in_turn}
    with postgres.database() as url, pooled(url, mode, **options) as through:
        with pytest.raises(SetupError, match="set pool_mode = session"):
            PostgresStore(through)
        # Nothing was changed before that was found out.
        assert ask(url, "SELECT count(*) FROM pg_tables WHERE tablename = 'mailbox'") == [(0,)]
