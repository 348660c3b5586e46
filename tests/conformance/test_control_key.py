"""The key of control messages is one in each database: the first that was made, over restarts (A8)."""


def test_the_first_key_that_was_made_stays(opened):
    first, second = bytes(range(32)), b"x" * 32
    with opened.store.transaction() as tx:
        assert tx.control_key(first) == first
    store = opened.reopen()
    with store.transaction() as tx:
        assert tx.control_key(second) == first
