"""The data set of the Spark demo: one day's deliveries from a seeded generator.

`python -m example_project.orders` writes data/orders.parquet again. Customers live in four time
zones and choose a delivery time in their local time. Some customers want no reminders. Some rows
have bad values, as in real tables.
"""

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq

PATH = Path(__file__).parent / "data" / "orders.parquet"
COUNT = 3_000
SEED = 20261120

#: Every delivery is within this day in UTC.
DAY = datetime(2026, 11, 21, tzinfo=UTC)

ZONES = ("Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe")

SCHEMA = pa.schema(
    [
        ("order_id", pa.int64()),
        ("email", pa.string()),
        ("zone", pa.string()),
        ("delivery", pa.string()),
        ("total", pa.float64()),
        ("opted_out", pa.bool_()),
    ]
)


def orders() -> list[dict[str, Any]]:
    """Return the rows; every call returns the same rows."""
    chance = random.Random(SEED)
    rows = [_order(number, chance) for number in range(1, COUNT + 1)]
    for number, (column, value) in enumerate(_BAD):
        rows[100 * number + 50] |= {column: value, "opted_out": False}
    return rows


#: The bad values of rows 50, 150, and so on. The demo shows why each of these rows is rejected.
_BAD = (
    ("delivery", None),
    ("delivery", "2026-11-31 09:00:00"),
    ("delivery", "tomorrow"),
    ("delivery", "+202626-11-21 09:00:00"),
    ("delivery", "2006-11-21 09:00:00"),
    ("zone", "Middle/Earth"),
    ("order_id", None),
    ("email", "x" * 200_000),
)


def _order(number: int, chance: random.Random) -> dict[str, Any]:
    zone = chance.choice(ZONES)
    # Most parcels come in the morning or in the evening, in the customer's time zone.
    second = int(86_400 * chance.betavariate(2, 2))
    at = (DAY + timedelta(seconds=second)).astimezone(ZoneInfo(zone))
    return {
        "order_id": number,
        "email": f"customer{chance.randrange(2_000)}@example.com",
        "zone": zone,
        "delivery": at.strftime("%Y-%m-%d %H:%M:%S"),
        "total": round(chance.lognormvariate(3.5, 0.8), 2),
        "opted_out": chance.random() < 0.08,
    }


def utc_of(delivery: str, zone: str) -> datetime:
    """Return the UTC time of a delivery."""
    return datetime.fromisoformat(delivery).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)


def main() -> None:
    PATH.parent.mkdir(exist_ok=True)
    table = pa.Table.from_pylist(orders(), schema=SCHEMA)
    pq.write_table(table, PATH, compression="zstd")
    print(f"{PATH}: {table.num_rows} orders, {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
