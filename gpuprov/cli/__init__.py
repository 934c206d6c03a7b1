"""The commands: parse, call, print. Controller only."""
