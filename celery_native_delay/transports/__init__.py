"""The transports: one module or folder for each message broker."""
