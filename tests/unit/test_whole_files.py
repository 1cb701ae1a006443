"""Files of kombu's filesystem transport appear when they are whole."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from kombu import Connection

from celery_native_delay.transports.sql.transport import transport_of


def test_no_consumer_sees_a_file_that_is_still_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("messages", "control")]
    for folder in folders:
        folder.mkdir()
    options = {
        "native_delay": True,
        "data_folder_in": str(folders[0]),
        "data_folder_out": str(folders[0]),
        "control_folder": str(folders[1]),
    }
    seen: list[str] = []

    def write(path: Path, data: bytes) -> int:
        seen.append(path.name)
        with path.open("wb") as file:
            return file.write(data)

    monkeypatch.setattr(Path, "write_bytes", write)
    ours = transport_of("filesystem")
    with Connection("filesystem://", transport=ours, transport_options=options) as connection:
        name = f"orders-{uuid4()}"  # kombu remembers bindings
        queue = connection.SimpleQueue(name)
        queue.put("whole")
        assert [name in each for each in seen] == [False]
        message = queue.get(block=False)
        assert message.payload == "whole"
        message.ack()
