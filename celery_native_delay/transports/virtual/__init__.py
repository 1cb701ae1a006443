"""Shared code of this package's subclasses of kombu's virtual transports."""
