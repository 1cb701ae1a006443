"""Settings for a folder as the broker, such as `filesystem:///var/shop`: one machine, no server."""

from pathlib import Path
from typing import Any

SCHEME = "filesystem://"


def settings_of(broker_url: str) -> dict[str, Any]:
    """Return the settings of an app whose broker is a folder; empty for any other broker."""
    if not broker_url.startswith(SCHEME):
        return {}
    folder = Path(broker_url.removeprefix(SCHEME))
    for name in ("queues", "control"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return {
        "broker_transport_options": {
            "data_folder_in": str(folder / "queues"),
            "data_folder_out": str(folder / "queues"),
            "control_folder": str(folder / "control"),
            "polling_interval": 0.05,  # seconds; 1 by default
        },
        # A folder cannot delay messages, so delayed tasks wait in a database beside the folder.
        "native_delay_store": f"sqlite:///{folder}/delays.db",
    }
