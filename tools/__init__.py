"""Programs for maintainers of gpuprov; no user and no host needs them."""
