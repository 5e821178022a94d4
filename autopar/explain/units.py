"""Numbers and counts as people read them: bytes in powers of 1024, seconds to three digits, shares in percent."""

from __future__ import annotations

import math

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(size: float) -> str:
    """Bytes for people: 512 B, 1.5 KiB, 16.0 GiB."""
    if size < 1024:
        return f"{size:.0f} B"
    for unit in _BYTE_UNITS[1:]:
        size /= 1024
        if round(size, 1) < 1024 or unit == _BYTE_UNITS[-1]:
            break
    return f"{size:,.1f} {unit}"


def seconds_text(seconds: float) -> str:
    """Seconds for people, three digits: 0 s, 12.3 us, 4.56 ms, 78.9 s, 1,234 s."""
    if seconds == 0:
        return "0 s"
    for unit, scale in (("ns", 1e9), ("us", 1e6), ("ms", 1e3)):
        if float(f"{seconds * scale:.3g}") < 1000:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds)} s"


def _three_digits(number: float) -> str:
    if not math.isfinite(number):
        return str(number)
    rounded = float(f"{number:.3g}") if number < 1000 else number
    decimals = 0 if rounded >= 100 else 1 if rounded >= 10 else 2
    return f"{rounded:,.{decimals}f}"


def slower_text(seconds: float, than_s: float) -> str:
    """By how much a step of so many seconds is slower than another: 3.6% slower; in seconds if the other takes no time."""
    return f"{seconds / than_s - 1:.1%} slower" if than_s else f"{seconds_text(seconds)} slower"


def mfu_text(mfu: float | None) -> str:
    """The part of the devices' peak that a step reaches, as the end of a line; empty if not known."""
    return "" if mfu is None else f"; MFU {mfu:.1%}"


def percent_text(part: float, whole: float) -> str:
    """`part` as a share of `whole`: 12%; 0% and 100% only if that is exact."""
    if not whole or part in (0, whole):
        return "100%" if whole and part else "0%"
    text = f"{part / whole:.0%}"
    exact = {"0%": "<1%", "100%": ">99%" if part < whole else ">100%"}
    return exact.get(text, text)
