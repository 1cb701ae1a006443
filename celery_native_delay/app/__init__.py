"""An app's part: what install() puts into it, and ``Delay(app)``."""
