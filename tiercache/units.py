"""Bytes and seconds as a person reads them."""

from __future__ import annotations


def format_bytes(size: float) -> str:
    """A size for people, three digits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1000 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.3g} {unit}"


def format_seconds(seconds: float) -> str:
    """A time for people: three digits of seconds, or hours and minutes."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
