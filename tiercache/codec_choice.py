"""Which codec the pages of each kind have in each tier, as options say it."""

from __future__ import annotations

from collections.abc import Mapping

from tiercache.errors import ConfigError

TIERS = ("host", "disk")
REST = "*"  # the kinds that have no entry of their own

CodecChoice = str | Mapping[str, str | Mapping[str, str]]


def by_kind(choice: CodecChoice) -> dict[str, dict[str, str]]:
    """Names of codecs by kind of page, then by tier below the device.

    Args:
        choice: a name for all pages; or by kind of page, "*" for the rest, a name or names by tier. Kinds and tiers
            that are not named are raw.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(choice, str):
        choice = {REST: choice}
    if not isinstance(choice, Mapping):
        raise ConfigError("codec: neither a name nor a table by kind of page", got=type(choice).__name__)
    misplaced = sorted({"device", *TIERS} & set(choice))
    if misplaced:
        raise ConfigError(
            "codec: tiers where kinds of pages belong",
            got=", ".join(misplaced),
            remedy='name tiers below a kind, as in {"*": {"host": "window", "disk": "exponent"}}',
        )
    table = {kind: _by_tier(kind, named) for kind, named in choice.items()}
    table.setdefault(REST, dict.fromkeys(TIERS, "raw"))
    return table


def _by_tier(kind: str, named: str | Mapping[str, str]) -> dict[str, str]:
    if isinstance(named, str):
        return dict.fromkeys(TIERS, named)
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named.values()):
        raise ConfigError(f"codec of {kind!r}: neither a name nor a table by tier", got=named)
    unknown = sorted(set(named) - set(TIERS))
    if unknown:
        raise ConfigError(
            f"codec of {kind!r}: tiers that keep no payloads",
            got=", ".join(map(str, unknown)),
            limit=", ".join(TIERS),
        )
    return {tier: named.get(tier, "raw") for tier in TIERS}
