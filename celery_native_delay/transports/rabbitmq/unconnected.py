"""A connection for what needs the store alone, while RabbitMQ may be away."""

from __future__ import annotations

from typing import Any, NoReturn

from kombu.exceptions import OperationalError
from kombu.transport import pyamqp

from . import transport


class UnconnectedChannel(transport.Channel):
    """A channel that writes into the store, declares nothing, and reaches no broker."""

    def exchange_declare(self, *args: Any, **kwargs: Any) -> None: ...
    def queue_declare(self, *args: Any, **kwargs: Any) -> None: ...
    def queue_bind(self, *args: Any, **kwargs: Any) -> None: ...

    def _basic_publish(
        self, msg: Any, exchange: str = "", routing_key: str = "", *_: Any, **__: Any
    ) -> None:
        # Celery would keep the event that a task was sent for ever, and send it never.
        if routing_key != "task.sent":
            raise OperationalError("it is away")

    def close(self, *args: Any, **kwargs: Any) -> None:
        self.connection = None


class UnconnectedConnection(transport.Connection):
    """An AMQP connection that is never opened."""

    Channel = UnconnectedChannel

    def connect(self, callback: Any = None) -> None: ...

    @property
    def frame_writer(self) -> NoReturn:
        """Raise OperationalError, as this connection sends nothing."""
        raise OperationalError("it is away")

    @property
    def server_properties(self) -> NoReturn:
        """Raise OperationalError, as no broker has told its product and version."""
        raise OperationalError("it is away")

    @server_properties.setter
    def server_properties(self, told: object) -> None: ...


class UnconnectedTransport(transport.Transport):
    """A transport of kombu whose connection is never opened."""

    def establish_connection(self) -> Any:
        self.Connection = UnconnectedConnection
        return pyamqp.Transport.establish_connection(self)

    def create_channel(self, connection: Any) -> UnconnectedChannel:
        return UnconnectedChannel(connection)

    def verify_connection(self, connection: Any) -> bool:
        return True
