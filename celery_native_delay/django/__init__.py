"""The Django app whose migrations create the tables of ``native_delay_store="django"``."""
