"""A load's meaning for a broker before it is there: arithmetic, a simulation, advice. Pure."""
