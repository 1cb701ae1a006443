"""Errors of private brokers."""


class BrokerMissing(Exception):
    """The broker that was asked for is not installed; the message says what to install."""


class BrokerFailed(Exception):
    """The broker did not start or refused a request; the message holds its own words."""
