"""The core of every run: System, processes, disk, changes, journal, apply, lock, download."""
