"""A handler that raises while a process forks leaves no lock held, no fork behind, and no second copy of the program."""

import logging
import os
import signal
import socket
import threading
import time

import pytest

from autopar.forks.held_signals import holding_signals
from autopar.forks.jobs import run_side_by_side


class RungError(Exception):
    """What a handler raises."""


@pytest.fixture
def rings():
    """The numbers of signals for which the handler of these tests ran; it raises."""
    came = []

    def ring(number, frame):
        came.append(number)
        raise RungError(number)

    before = {number: signal.signal(number, ring) for number in (signal.SIGALRM, signal.SIGUSR1)}
    yield came
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_run_at_the_end_each_of_them_and_are_in_place_again(rings):
    handler = signal.getsignal(signal.SIGALRM)

    def hold_two():
        with holding_signals():
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGUSR1)
            assert rings == []

    with pytest.raises(RungError):
        hold_two()
    assert rings == [signal.SIGALRM, signal.SIGUSR1]
    assert signal.getsignal(signal.SIGALRM) is signal.getsignal(signal.SIGUSR1) is handler


def test_whoever_waits_for_signals_by_a_file_hears_of_each_once():
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.setblocking(False)
        before = signal.set_wakeup_fd(there.fileno())
        handler = signal.signal(signal.SIGUSR2, lambda number, frame: None)
        try:
            with holding_signals():
                signal.raise_signal(signal.SIGUSR2)
        finally:
            signal.set_wakeup_fd(before)
            signal.signal(signal.SIGUSR2, handler)
        assert here.recv(8) == bytes([signal.SIGUSR2])


def test_what_is_ignored_or_left_to_the_system_stays_so():
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with holding_signals():
        held = {number for number in before if signal.getsignal(number) != before[number]}
        assert held == {number for number, handler in before.items() if callable(handler)}
    assert {number: signal.getsignal(number) for number in before} == before


def test_the_error_of_a_block_is_raised(rings):
    with pytest.raises(ZeroDivisionError), holding_signals():
        1 / 0  # noqa: B018 - it raises
    assert rings == []


def test_other_threads_hold_nothing(rings):
    found = []

    def look():
        with holding_signals():
            found.append(signal.getsignal(signal.SIGALRM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGALRM)]


def others_can_log():
    """Whether another thread than this one gets the lock of `logging`."""
    found = []

    def log():
        found.append(logging._lock.acquire(timeout=5))
        if found[0]:
            logging._lock.release()

    thread = threading.Thread(target=log)
    thread.start()
    thread.join()
    return found[0]


def test_an_alarm_that_rings_as_a_process_forks_leaves_others_able_to_log(rings):
    for after_ms in range(1, 41):
        signal.setitimer(signal.ITIMER_REAL, after_ms / 4000)
        try:
            run_side_by_side([lambda: time.sleep(0.02)] * 2, processes=2)
        except RungError:
            assert rings
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert others_can_log()


def test_a_fork_during_which_a_signal_comes_is_gone_when_the_handler_has_raised(rings, monkeypatch):
    fork, made = os.fork, []

    def fork_and_ring():
        made.append(fork())
        if made[0]:
            signal.raise_signal(signal.SIGALRM)
        return made[0]

    monkeypatch.setattr(os, "fork", fork_and_ring)
    with pytest.raises(RungError):
        run_side_by_side([lambda: time.sleep(60)] * 2, processes=2)
    with pytest.raises(ProcessLookupError):
        os.kill(made[0], 0)


def test_a_signal_that_a_fork_gets_as_it_begins_does_not_run_the_handler_of_the_program(rings, monkeypatch):
    fork, here = os.fork, os.getpid()

    def end_this_copy(number, frame):
        os._exit(7)

    def fork_and_ring():
        process = fork()
        if process == 0:
            signal.raise_signal(signal.SIGUSR1)
        return process

    def job():
        time.sleep(1)
        return os.getpid()

    signal.signal(signal.SIGUSR1, end_this_copy)
    monkeypatch.setattr(os, "fork", fork_and_ring)
    assert len({*run_side_by_side([job] * 2, processes=2)} - {here}) == 1


def test_a_fork_that_is_ended_as_a_signal_comes_is_gone_all_the_same(rings, monkeypatch):
    wait, here, asked = os.waitpid, os.getpid(), []

    def wait_and_ring(process, options):
        asked.append(process)
        if options == 0:
            signal.raise_signal(signal.SIGALRM)
        return wait(process, options)

    def job():
        if os.getpid() != here:
            time.sleep(60)
        raise ZeroDivisionError

    monkeypatch.setattr(os, "waitpid", wait_and_ring)
    with pytest.raises(RungError):
        run_side_by_side([job] * 2, processes=2, ends_at_error=True)
    assert rings == [signal.SIGALRM]
    with pytest.raises(ChildProcessError):
        wait(asked[-1], os.WNOHANG)


def test_a_fork_that_had_ended_before_it_was_noted_has_ended(rings, monkeypatch):
    """The handler of a signal that comes during the call raises right behind it."""
    wait, here = os.waitpid, os.getpid()

    def wait_and_ring(process, options):
        ended = wait(process, options)
        if ended[0]:
            monkeypatch.setattr(os, "waitpid", wait)
            signal.raise_signal(signal.SIGALRM)
        return ended

    monkeypatch.setattr(os, "waitpid", wait_and_ring)
    with pytest.raises(RungError):
        run_side_by_side([lambda: time.sleep(0 if os.getpid() == here else 0.2)] * 2, processes=2)
