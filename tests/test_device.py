import os

from raftune.device import current_device, thread_environment


def test_a_main_thread_that_was_pinned_meanwhile_does_not_change_the_key(monkeypatch):
    before = current_device(1)
    environment = thread_environment(2, pinned=True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert current_device(1) == before
    assert thread_environment(2, pinned=True) == environment
