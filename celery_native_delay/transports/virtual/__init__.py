"""What the transports on kombu's virtual ones have in common; beneath all of them."""
