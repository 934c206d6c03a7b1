"""What each boot must bring: units, the program that they start, and whether a reboot is needed."""
