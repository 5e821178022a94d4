"""What commands print with `--json`: one document and nothing else, as its schema says."""

import json
from pathlib import Path

import autopar.commands
from autopar.cost_model.json_files import schema_at, violations
from autopar.files.checked import VERIFICATION_SCHEMA
from tests.commands.command_line import run

SCHEMAS = Path(autopar.commands.__file__).with_name("schemas")


def schema_of(command):
    """The file of a command's schema."""
    if command == "verify":
        return VERIFICATION_SCHEMA
    return SCHEMAS / f"{command.replace('show', 'explain')}.schema.json"


def document(capsys, command, *argv, status=0):
    """The document that a command prints; the status and the schema are checked."""
    capsys.readouterr()
    assert run(command, *argv, "--json") == status
    found = json.loads(capsys.readouterr().out)
    assert violations(found, schema_at(schema_of(command))) == []
    return found
