"""Eviction policies: the same compiled hooks in the store and in the simulator."""
