"""Code shared by the transports that extend kombu's virtual transports."""
