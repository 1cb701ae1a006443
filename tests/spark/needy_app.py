"""An app that reads an environment variable, which executors lack."""

import os

app = os.environ["SHOP_BROKER_URL"]
