"""Package managers: repositories' keys, indexes, packages, holds, locks, and what the managers say."""
