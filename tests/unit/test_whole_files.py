"""Files of kombu's filesystem transport are taken when they are whole."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from kombu import Connection

from celery_native_delay.transports.sql.transport import transport_of


@pytest.mark.parametrize("keeps", [False, True], ids=["forgets", "keeps what was processed"])
def test_a_message_that_another_producer_still_writes_is_left_alone(
    tmp_path: Path, keeps: bool
) -> None:
    """kombu's own consumer takes it, fails on it, and it is lost."""
    folders = {name: tmp_path / name for name in ("messages", "processed", "control")}
    for folder in folders.values():
        folder.mkdir()
    options = {
        "native_delay": True,
        "data_folder_in": str(folders["messages"]),
        "data_folder_out": str(folders["messages"]),
        "control_folder": str(folders["control"]),
        "processed_folder": str(folders["processed"]),
        "store_processed": keeps,
    }
    ours = transport_of("filesystem")
    with Connection("filesystem://", transport=ours, transport_options=options) as connection:
        queue = connection.SimpleQueue(f"orders-{uuid4()}")  # kombu remembers bindings
        queue.put("whole")
        [file] = folders["messages"].iterdir()
        whole = file.read_bytes()
        for part in (b"", whole[: len(whole) // 2]):
            file.write_bytes(part)
            with pytest.raises(queue.Empty):
                queue.get(block=False)
        file.write_bytes(whole)
        message = queue.get(block=False)
        assert message.payload == "whole"
        message.ack()
    assert not list(folders["messages"].iterdir())
    assert [each.name for each in folders["processed"].iterdir()] == [file.name] * keeps
