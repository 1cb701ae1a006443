"""Transports for kombu: one module or folder for each message broker."""
