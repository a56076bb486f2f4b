"""Measuring what this machine can do, for `tiercache profile`. One thing measured a file."""
