"""Packages of apt, dnf and zypper: repositories, keys, installation, holds, locks, and a class for each manager."""
