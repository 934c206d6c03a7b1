"""How many examples a property gets that is worth more or fewer than others."""

from hypothesis import settings


def examples(number: int) -> int:
    """Return the number for the profile that is loaded, in which an ordinary property would have 100 of these."""
    return max(number * settings().max_examples // 100, 1)
