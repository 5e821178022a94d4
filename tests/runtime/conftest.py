"""What tests of the runtime share."""

import threading

import pytest


@pytest.fixture
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before
