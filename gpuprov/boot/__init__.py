"""Boot-time work: systemd units, the program that they start, and whether a reboot is needed."""
