"""One class for each package manager: apt, dnf, zypper. All that differs between them is in its class."""
