"""Compiled structures that several policies share; their words lie in M's scratch."""
