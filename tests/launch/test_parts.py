"""The parts of the supervisor alone: causes, messages, lines, sizes, flags."""

import errno
import io
import re
import signal
import subprocess

import pytest
import yaml

from autopar.commands import parser
from autopar.errors import ArgumentError
from autopar.launch.endings import Ending, cause_of
from autopar.launch.environment import with_virtual_devices
from autopar.launch.messages import Message, MessageReader
from autopar.launch.output import PrefixedLines
from autopar.launch.settings import Size
from autopar.launch.size_file import SizeFile, parse_size
from tests.launch.launching import ROOT

KILLED = Ending(rank=2, kind="signal", at_s=3.0, status=signal.SIGKILL)
ABORTED = Ending(rank=1, kind="signal", at_s=1.0, status=signal.SIGABRT)
RAISED = Ending(rank=0, kind="exit", at_s=2.0, status=1, words="ValueError: broken")
RAISED_LATER = Ending(rank=3, kind="exit", at_s=2.5, status=1, words="TypeError: broken, too")
TOLD = Ending(rank=1, kind="exit", at_s=1.5, status=1, words="PipelineError: process 0 failed: ValueError: broken")
SILENT = Ending(rank=3, kind="silent", at_s=0.5, silent_s=30.0)
DONE = Ending(rank=0, kind="done", at_s=0.1)


@pytest.mark.parametrize(
    ("endings", "cause"),
    [
        ([KILLED, RAISED, ABORTED, TOLD, SILENT, DONE], KILLED),
        ([RAISED_LATER, ABORTED, TOLD, SILENT, RAISED], RAISED),
        ([TOLD, SILENT, ABORTED], SILENT),
        ([TOLD, ABORTED], ABORTED),
    ],
)
def test_what_follows_from_another_ending_is_not_the_cause(endings, cause):
    assert cause_of(endings) == cause


def test_messages_come_through_a_pipe_in_any_pieces():
    sent = [Message(kind="beat", at_s=1.5, steps=n, words="é\n" * 3000 * n) for n in range(2)]
    data = b"".join(message.line() for message in sent)
    assert all(len(line) < 4096 for line in data.splitlines())
    reader = MessageReader()
    found = [message for n in range(0, len(data), 7) for message in reader.feed(data[n : n + 7])]
    assert [message.steps for message in found] == [0, 1]
    assert sent[1].words.startswith(found[1].words)


def test_each_line_of_a_worker_has_its_number_in_front():
    target = io.StringIO()
    lines = PrefixedLines("[3] ", target)
    for piece in (b"one\ntw", b"o\r\n", b"30 %\r60 %\r", b"\xff and the rest"):
        lines.feed(piece)
    lines.close()
    assert target.getvalue() == "[3] one\n[3] two\n[3] 30 %\n[3] 60 %\n[3] \ufffd and the rest\n"


def test_workers_go_on_when_nobody_reads_what_they_write():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    lines = PrefixedLines("", Gone())
    lines.feed(b"one\n")
    lines.feed(b"two\n")


def test_workers_go_on_when_the_disk_with_their_output_is_full():
    class Full(io.StringIO):
        room = False

        def flush(self):
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")

    target = Full()
    lines = PrefixedLines("", target)
    lines.feed(b"one\n")
    target.room = True
    lines.feed(b"two\n")
    assert target.getvalue().endswith("two\n")


@pytest.mark.parametrize(
    ("text", "size"),
    [("4", Size(4, 2)), (" 4 \n", Size(4, 2)), ("3 1", Size(3, 1)), ("3x8", Size(3, 8)), ("", Size(2, 2))],
)
def test_a_size_is_one_or_two_numbers(text, size):
    assert parse_size(text, Size(2, 2)) == size


@pytest.mark.parametrize("text", ["0", "2 0", "-1", "four", "1 2 3"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ArgumentError, match=re.escape(repr(text)) + " is no size of a job"):
        parse_size(text, Size(1))


def test_a_file_of_a_size_that_cannot_be_read_changes_nothing_and_is_told_once(tmp_path):
    said, path = [], tmp_path / "size"
    file = SizeFile(path, said.append)
    assert file.read(Size(2)) == Size(2)
    path.mkdir()
    assert [file.read(Size(2)) for _ in range(3)] == [Size(2)] * 3
    path.rmdir()
    path.write_text("3")
    assert file.read(Size(2)) == Size(3)
    assert len(said) == 1
    assert "the job stays as it is" in said[0]


def test_virtual_devices_replace_those_of_the_environment():
    before = "--xla_a=1 --xla_force_host_platform_device_count=8"
    assert with_virtual_devices(before, 2) == "--xla_a=1 --xla_force_host_platform_device_count=2"


@pytest.mark.parametrize("name", ["launch.slurm", "launch.yaml"])
def test_the_command_of_an_example_for_a_cluster_can_be_read(name):
    text = (ROOT / "docs" / "examples" / name).read_text().replace("\\\n", " ")
    if name.endswith(".slurm"):
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    else:
        text = "\n".join(container["args"][0] for container in containers(text))
    (command,) = re.findall(r"exec autopar (launch [^'\n]*(?:\n +--[^'\n]*)*)", text.replace("'\"$first\"'", "first"))
    words = [re.sub(r"\"?\$\w+\"?", "1", word).strip('"') for word in command.split()]
    options = parser.read(words)
    assert (options.processes, options.max_restarts, options.script) == (1, 0, ["train.py"])
    assert re.fullmatch(r"[\w.-]+:12765", options.coordinator)


def containers(text):
    """The containers of a file of Kubernetes."""
    jobs = [document for document in yaml.safe_load_all(text) if document["kind"] == "Job"]
    return [container for job in jobs for container in job["spec"]["template"]["spec"]["containers"]]
