"""The table of tenants, and counting and ending a tenant's mailboxes (A6, S7)."""

from mediator.mailboxes import creating
from mediator.mailboxes.bounds import Bounds, Quota
from mediator.mailboxes.creating import Create
from mediator.mailboxes.quotas import Quotas
from mediator.tenants.records import Tenant, TenantTables, TenantUser
from tests.harness.stores import undone, within

ACME = Tenant("acme", 1, users=(TenantUser("ann", "hash"),), quotas={"rate": 5})


def test_tenants_outlive_a_restart(opened):
    with within(opened.store.transaction(), TenantTables) as tx:
        assert (tx.tenants.revision(), tx.tenants.all()) == (0, {})
        tx.tenants.lock()
        tx.tenants.save(Tenant("acme", 1))
        tx.tenants.save(ACME)
        tx.tenants.save(Tenant("b", 2, removed_at=3))
        assert tx.tenants.revise() == 1
    with undone(opened.store, TenantTables) as tx:
        tx.tenants.save(Tenant("acme", 9))
        assert tx.tenants.revise() == 2
    with within(opened.reopen().reading(), TenantTables) as tx:
        assert tx.tenants.all() == {"acme": ACME, "b": Tenant("b", 2, removed_at=3)}
        assert tx.tenants.revision() == 1
        assert [tx.tenants.is_removed(name) for name in ("acme", "b", "nobody")] == [False, True, False]


def test_mailboxes_are_counted_and_ended(store):
    def create(tx, name, ttl=0, tenant="acme", public=False):
        wanted = Create(tenant, name, ttl=ttl, public=public)
        creating.create(tx, Bounds(), bytes, wanted, 10, Quotas(Quota(), Quota()))

    with store.transaction() as tx:
        for name, ttl in (("a", 0), ("b", 5), ("c", 0)):
            create(tx, name, ttl, public=name == "c")
        create(tx, "a", tenant="other")
        assert tx.mailboxes.count("acme", 12) == 3
        create(tx, "d")
        assert tx.mailboxes.count("acme", 12) == 4
    with store.reading() as tx:
        assert len(tx.mailboxes.held("acme", 10)) == 5, "that of the public list too"
        assert len(tx.mailboxes.held("acme", 2)) == 2
    with store.transaction() as tx:
        assert creating.delete_all(tx, "acme", 4, 20) == 4
        assert creating.delete_all(tx, "acme", 4, 20) == 1
        assert creating.delete_all(tx, "acme", 4, 20) == 0
    with store.reading() as tx:
        assert tx.mailboxes.tenants() == ["other"]
        assert len(tx.mailboxes.retired(10)) == 5
