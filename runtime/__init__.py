"""Autograd and models: exact branch replay over a tiered store."""
