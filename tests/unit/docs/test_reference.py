"""The pages of docs/reference are what scripts/reference generates now, and name all that there is."""

from __future__ import annotations

import re

import pytest

from protos.pageant.v1 import control_pb2, inference_pb2, load_report_pb2
from scripts.documents.reference.main import FOLDER, PAGES
from scripts.documents.reference.protos import declarations, read
from scripts.documents.reference.source import Remark, remarks
from services.gateway.http.chat.objects import ChatBody
from shared.config import Settings
from shared.config.catalogue import shown
from shared.messages.inboxes import INBOXES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_not_stale(name: str) -> None:
    path = FOLDER / name
    written = path.read_text(encoding="utf-8") if path.exists() else ""
    assert written == PAGES[name](), f"docs/reference/{name} is stale: run scripts/reference"


def test_every_page_is_generated_and_in_the_index() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)
    index = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    assert all(f"(reference/{name})" in index for name in PAGES)


def test_settings_have_their_true_defaults() -> None:
    rows = dict(re.findall(r"^\| `(\w+)`[^|]*\| [^|]*\| (.*?) \|", PAGES["settings.md"](), re.MULTILINE))
    assert rows == {
        name: f"`{shown(default)}`" if default != "" else "empty" for name, default in Settings().flat().items()
    }


def test_the_proto_files_are_read_as_protoc_reads_them() -> None:
    found = {one.name: [(entry.name, entry.number) for entry in one.entries] for one in declarations()}
    for module in (inference_pb2, control_pb2, load_report_pb2):
        for message in module.DESCRIPTOR.message_types_by_name.values():
            assert found.pop(message.name) == [(field.name, str(field.number)) for field in message.fields]
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            assert found.pop(enum.name) == [(value.name, str(value.number)) for value in enum.values]
        for service in module.DESCRIPTOR.services_by_name.values():
            assert found.pop(service.name) == [(method.name, "") for method in service.methods]
    assert not found


def test_a_line_of_a_proto_file_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(ValueError, match="extend"):
        read("message M {\n  extend Other;\n}\n")


def test_every_message_of_an_inbox_has_a_sender_and_a_receiver() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\(#\w+\) \| ([^|]+) \| ([^|]+) \|$", PAGES["messages.md"](), re.MULTILINE)
    assert {name for name, _, _ in rows} == {kind.__name__ for union in INBOXES for kind in union.__args__}
    assert all(sender.strip() and receiver.strip() for _, sender, receiver in rows)


def test_comments_of_fields_are_found() -> None:
    found = remarks(ChatBody)
    assert found["modalities"].own == "only text"
    assert found["audio"] == Remark("", "not possible here")
    assert found["messages"] == Remark()
