"""Common ground of the transports on kombu's virtual ones; beneath all of them."""
