"""Code shared by our transports that extend kombu's virtual transports."""
