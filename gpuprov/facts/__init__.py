"""What a host is, gathered before a plan; changes nothing."""
